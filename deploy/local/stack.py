"""Owns the laptop stack's life: checks, start with a deadline, supervision, and an end that leaves no process.

Must not import ray: this process has to answer a signal at any moment, whatever Ray is doing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import httpx

from deploy.hosting.environment import head_environment
from deploy.local.preflight import (
    StackError,
    check_folder,
    check_memory,
    check_model,
    check_port,
    check_redis,
    reachable,
)
from deploy.local.valkey import EmbeddedValkey
from deploy.process_tree import adopt_orphans, end_descendants, end_with_parent, reap
from services.settings import Recipe
from services.streams.connection.url import redacted

log = logging.getLogger(__name__)

START_S = 120.0
# The head drains in 12 s and ends Ray in about 2 s; the whole stop stays below 20 s.
HEAD_STOP_S = 15.5
GRACE_S = 1.5
SUPERVISE_S = 0.2
HEAD_MODULE = "deploy.local.head"
CALM_S = 10.0
HEAD_DEATHS = 5
"""Deaths of Ray in a row, each before it had been ready for CALM_S seconds, from which the stack recovers."""
FIRST_DEATHS = 2
"""The same while it has never been ready: Ray gives its agents 15 s to start, and ends where they need more."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, _: FrameType | None) -> None:
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def end_on_signals() -> None:
    """Make the first SIGINT, SIGTERM or SIGHUP raise KeyboardInterrupt; later ones do not disturb the end."""
    for one in SIGNALS:
        signal.signal(one, _interrupt)


def ignore_signals() -> None:
    """From now on no signal disturbs the end, which is bounded in time."""
    try:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
    except KeyboardInterrupt:
        log.debug("the signal came just before; its handler has done the same")


class LocalStack:
    """Everything that `penstock up` runs. Use as a context manager in a process's main thread.

    A thread supervises: it starts an embedded Redis that died again on its data, and Ray with all it hosts; runs are
    taken up where their records stand. It must outlive what it starts, for that is told to end with its parent thread.
    """

    def __init__(
        self, runs: Path, *, host: str = "127.0.0.1", port: int, redis_url: str | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:  # fmt: skip
        self.api = f"http://{reachable(host)}:{port}"
        self.runs = runs.absolute()
        self.redis_url = redis_url
        self._address = (host, port)
        self._report = report
        self._folder = self.runs / ".stack"
        self._head_log = self._folder / "head.log"
        self._valkey: EmbeddedValkey | None = None
        self._head: subprocess.Popen[str] | None = None
        self._phases: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ray_folder: Path | None = None
        self._lock: IO[str] | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._guard = threading.Lock()
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._failure: StackError | None = None
        self._ready = False
        self._was_ready = False
        self._starts = 0
        self._head_since = 0.0
        self._head_deaths = 0
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> LocalStack:
        try:
            self.start()
        except BaseException:  # Ctrl-C too: whatever had been started must end
            self.stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def check(self, recipe: Recipe | None = None) -> None:
        """Look for obstacles. Raises StackError or RedisUnavailableError with one line."""
        check_port(*self._address)
        check_folder(self.runs)
        if recipe is not None:
            check_model(recipe)
        check_memory(recipe)
        if self.redis_url is not None:
            check_redis(self.redis_url)

    def start(self) -> None:
        """Start everything and wait until the API is ready. Raises StackError after 120 s."""
        began = time.monotonic()
        end_on_signals()
        adopt_orphans()
        self._take_folder()
        if self.redis_url is None:
            self._report("starting Redis (embedded)")
            self._valkey = EmbeddedValkey(self._folder / "valkey", self._ending)
            self.redis_url = self._valkey.start()
        self._head_log.unlink(missing_ok=True)
        self._start_head()
        self._supervisor.start()
        self._await_ready(began + START_S)
        self.seconds["start"] = time.monotonic() - began

    def _take_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"--runs: {self.runs} is in use by another stack; another folder is accepted") from None

    def _start_head(self) -> None:
        host, port = self._address
        self._phases, self._ready, self._head_since = queue.Queue(), False, time.monotonic()
        self._starts += 1
        # Ray's socket paths may not exceed 107 characters, so its folder cannot lie below ours.
        self._ray_folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
        # In a variable, because arguments are shown to everybody and the address may hold a password.
        environment = {**head_environment("127.0.0.1", str(self.runs)), "PENSTOCK_REDIS": str(self.redis_url)}
        with self._head_log.open("a") as errors:
            self._head = subprocess.Popen(
                [
                    sys.executable, "-m", HEAD_MODULE, "--host", host,
                    "--port", str(port), "--cores", str(os.cpu_count() or 1), "--folder", str(self._ray_folder),
                ],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        assert self._head.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._head.stdout, self._phases), daemon=True)
        self._listener.start()

    def _listen(self, lines: IO[str], phases: queue.Queue[dict[str, Any]]) -> None:
        with lines:
            for line in lines:
                if line.startswith("{"):
                    phases.put(json.loads(line))

    def _await_ready(self, deadline: float) -> None:
        while not (self._ready and self._api_ready()):
            self.check_alive()
            if time.monotonic() > deadline:
                what = f"the API at {self.api}" if self._ready else "the stack"
                raise StackError(f"{what} was not ready within {START_S:g} s")
            time.sleep(0.1)

    def _api_ready(self) -> bool:
        try:
            return httpx.get(f"{self.api}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def shown_redis(self) -> str:
        """The address of Redis, without its password."""
        return redacted(self.redis_url or "")

    def wait(self) -> None:
        """Return never; raise StackError when a part of the stack ends by itself."""
        while True:
            self.check_alive()
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raises StackError when a part of the stack has ended, and starting it again does not help."""
        if self._failure is not None:
            raise self._failure

    def _supervise(self) -> None:
        while not self._ended.wait(SUPERVISE_S):
            with self._guard:
                if self._ending.is_set() or self._failure is not None:
                    continue
                try:
                    self._restart_dead()
                except StackError as error:
                    self._failure = error
                except Exception as error:
                    log.exception("the supervision failed")
                    self._failure = StackError(f"the stack cannot be supervised: {type(error).__name__}: {error}")

    def _restart_dead(self) -> None:
        if self._valkey is not None and not self._valkey.alive:
            self._report("Redis (embedded) ended by itself; starting it again on its data")
            self._valkey.revive()
        self._hear_head()
        if self._head is not None and self._head.poll() is not None:
            self._listener.join(1.0)
            self._hear_head()  # its last words
            self._restart_head(self._head.returncode)
        if self._starts > 1 and not self._ready and time.monotonic() - self._head_since > START_S:
            raise StackError(f"Ray was not ready again within {START_S:g} s (log: {self._head_log})")

    def _hear_head(self) -> None:
        while not self._phases.empty():
            said = self._phases.get()
            if said["phase"] == "failed":  # it gave up; another start would not cure that
                raise StackError(f"{said['text']} (log: {self._head_log})")
            if said["phase"] == "ready":
                self._ready = self._was_ready = True
                self._head_since = time.monotonic()
            text = said["text"] or ("Ray is up again" if self._starts > 1 else "")
            if text:
                self._report(str(text))

    def _restart_head(self, status: int) -> None:
        ended = f"Ray's head process ended with {status}"
        quick = not self._ready or time.monotonic() - self._head_since < CALM_S
        self._head_deaths = self._head_deaths + 1 if quick else 1
        allowed = HEAD_DEATHS if self._was_ready else FIRST_DEATHS
        # One that was asked to end is not started again.
        if status == 0 or self._head_deaths > allowed:
            tail = "".join(self._head_log.read_text().strip().splitlines()[-1:])
            times = f", {self._head_deaths} times in a row" if self._head_deaths > 1 else ""
            raise StackError(f"{ended}{times}: {tail}")
        self._report(f"{ended}; starting Ray again")
        end_descendants(GRACE_S, spare=self._valkey.pid if self._valkey else None)
        self._keep_logs()
        self._start_head()

    def stop(self) -> None:
        """Drain and end everything, within 20 s; afterwards this process has no descendant."""
        ignore_signals()
        began = time.monotonic()
        self._ending.set()
        with self._guard:
            self._end_processes()
        self._ended.set()
        if self._lock is not None:
            self._lock.close()
        self.seconds["stop"] = time.monotonic() - began

    def _end_processes(self) -> None:
        if self._head is not None and self._head.poll() is None:
            self._head.terminate()
            try:
                self._head.wait(HEAD_STOP_S)
            except subprocess.TimeoutExpired:
                log.warning("the head did not end within %g s", HEAD_STOP_S)
        # Redis goes last: what drains still writes to it.
        others = end_descendants(GRACE_S, spare=self._valkey.pid if self._valkey else None)
        if self._valkey is not None:
            self._valkey.stop()
            self._valkey.close()
        reap()
        if others:
            self._report(f"had to kill {', '.join(others)}")
        self._keep_logs()

    def _keep_logs(self) -> None:
        """Move Ray's logs into our folder, in place of the last session's, and remove its sockets."""
        if self._ray_folder is None:
            return
        kept = self._folder / "ray-logs"
        shutil.rmtree(kept, ignore_errors=True)
        for logs in self._ray_folder.glob("session_2*/logs"):
            shutil.move(logs, kept)
        shutil.rmtree(self._ray_folder, ignore_errors=True)
