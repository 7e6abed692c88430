"""Owns the laptop stack from start to end: checks, start with a deadline, supervision, and a stop without leftovers.

Must not import ray: this process has to react to signals at any moment, whatever Ray is doing.
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
from deploy.local.api_token import ApiToken
from deploy.local.preflight import (
    StackError,
    check_environment,
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

START_S = 240.0
"""For all parts together: a machine that other programs use may need ten times the usual 20 s."""
# The head drains in 12 s and ends Ray in about 2 s; the whole stop stays below 20 s.
HEAD_STOP_S = 15.5
GRACE_S = 1.5
SUPERVISE_S = 0.2
HEAD_MODULE = "deploy.local.head"
CALM_S = 10.0
HEAD_DEATHS = 5
"""How many times in a row Ray is restarted if it dies before it has been ready for CALM_S seconds."""
FIRST_DEATHS = 2
"""The same while Ray has never been ready."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, _: FrameType | None) -> None:
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def end_on_signals() -> None:
    """Make the first SIGINT, SIGTERM or SIGHUP raise KeyboardInterrupt; later ones are ignored."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignore all signals from now on: the stop has a time limit and must not be cut short."""
    try:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        log.debug("a signal arrived just before; its handler ignores further signals as well")


class LocalStack:
    """Everything that `penstock up` runs. Use as a context manager in a process's main thread.

    A thread supervises the stack: it restarts an embedded Redis that died, with its data, and Ray with all hosted
    processes; runs are resumed from their records. The thread must outlive the processes that it starts, because they
    are ended together with their parent thread.
    """

    def __init__(
        self,
        runs: Path,
        *,
        host: str = "127.0.0.1",
        port: int,
        redis_url: str | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        self.api = f"http://{reachable(host)}:{port}"
        self.runs = runs.absolute()
        self.redis_url = redis_url
        self._address = (host, port)
        self._token = ApiToken(port)
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
        except BaseException:  # Ctrl-C included: all processes started so far must end
            self.stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def check(self, recipe: Recipe | None = None) -> None:
        """Run the preflight checks. Raises StackError or RedisUnavailableError with one line."""
        check_environment()
        check_port(*self._address)
        check_folder(self.runs)
        if recipe is not None:
            check_model(recipe)
        check_memory(recipe)
        if self.redis_url is not None:
            check_redis(self.redis_url)

    def start(self) -> None:
        """Start all processes and wait until the API is ready. Raises StackError after START_S seconds."""
        began = time.monotonic()
        end_on_signals()
        adopt_orphans()
        self._take_folder()
        self._token.write()
        if self.redis_url is None:
            self._report("starting Redis (embedded)")
            self._valkey = EmbeddedValkey(self._folder / "valkey", self._ending)
            self._valkey.start()
            self.redis_url = self._valkey.address
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
            raise StackError(f"--runs: {self.runs} is in use by another stack: expected another folder") from None

    def _start_head(self) -> None:
        host, port = self._address
        self._phases, self._ready, self._head_since = queue.Queue(), False, time.monotonic()
        self._starts += 1
        # Ray's socket paths may not exceed 107 characters, so its folder cannot be inside ours.
        self._ray_folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
        # In variables: every user of the machine sees arguments, and the address may contain a password.
        environment = head_environment("127.0.0.1", str(self.runs)) | {"PENSTOCK_REDIS": str(self.redis_url)}
        environment |= self._token.environment
        if self._valkey is not None:
            environment |= self._valkey.login
        command = [sys.executable, "-m", HEAD_MODULE, "--host", host, "--port", str(port)]
        command += ["--cores", str(os.cpu_count() or 1), "--folder", str(self._ray_folder)]
        with self._head_log.open("a") as errors:
            self._head = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,  # and not a session of its own, as for Redis
                preexec_fn=end_with_parent,
            )
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
    def sign_in_link(self) -> str:
        """See ApiToken."""
        return self._token.sign_in_link(self.api)

    @property
    def shown_redis(self) -> str:
        """The address of Redis, without its password."""
        return redacted(self.redis_url or "")

    def wait(self) -> None:
        """Never return; raise StackError when the supervision fails."""
        while True:
            self.check_alive()
            time.sleep(0.5)

    def check_alive(self) -> None:
        """Raises StackError when a part of the stack has died and restarting it has failed."""
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
                    log.exception("supervising the stack failed")
                    self._failure = StackError(f"supervising the stack failed: {type(error).__name__}: {error}")

    def _restart_dead(self) -> None:
        if self._valkey is not None and not self._valkey.alive:
            self._report("Redis (embedded) died; restarting it with its data")
            self._valkey.restart()
        self._read_phases()
        if self._head is not None and self._head.poll() is not None:
            self._listener.join(1.0)
            self._read_phases()  # what it reported before it died
            self._restart_head(self._head.returncode)
        if self._starts > 1 and not self._ready and time.monotonic() - self._head_since > START_S:
            raise StackError(f"Ray was not ready again within {START_S:g} s (log: {self._head_log})")

    def _read_phases(self) -> None:
        while not self._phases.empty():
            report = self._phases.get()
            if report["phase"] == "failed":  # a restart would fail in the same way
                raise StackError(f"{report['text']} (log: {self._head_log})")
            if report["phase"] == "ready":
                self._ready = self._was_ready = True
                self._head_since = time.monotonic()
            text = report["text"] or ("Ray is up again" if self._starts > 1 else "")
            if text:
                self._report(str(text))

    def _restart_head(self, status: int) -> None:
        ended = f"Ray's head process exited with {status}"
        quick = not self._ready or time.monotonic() - self._head_since < CALM_S
        self._head_deaths = self._head_deaths + 1 if quick else 1
        allowed = HEAD_DEATHS if self._was_ready else FIRST_DEATHS
        # Status 0: it ended on request, and is not restarted.
        if status == 0 or self._head_deaths > allowed:
            tail = "".join(self._head_log.read_text().strip().splitlines()[-1:])
            times = f", {self._head_deaths} times in a row" if self._head_deaths > 1 else ""
            raise StackError(f"{ended}{times}: {tail}")
        self._report(f"{ended}; restarting Ray")
        end_descendants(GRACE_S, spare=self._valkey.pid if self._valkey else None)
        self._keep_logs()
        self._start_head()

    def stop(self) -> None:
        """Drain and end all processes, within 20 s; afterwards this process has no descendants."""
        ignore_signals()
        began = time.monotonic()
        self._ending.set()
        with self._guard:
            self._end_processes()
        self._ended.set()
        self._token.remove()
        if self._lock is not None:
            self._lock.close()
        self.seconds["stop"] = time.monotonic() - began

    def _end_processes(self) -> None:
        if self._head is not None and self._head.poll() is None:
            self._head.terminate()
            try:
                self._head.wait(HEAD_STOP_S)
            except subprocess.TimeoutExpired:
                log.warning("Ray's head process did not end within %g s", HEAD_STOP_S)
        # Redis is stopped last: processes that drain still write to it.
        others = end_descendants(GRACE_S, spare=self._valkey.pid if self._valkey else None)
        if self._valkey is not None:
            self._valkey.stop()
            self._valkey.close()
        reap()
        if others:
            self._report(f"had to kill {', '.join(others)}")
        self._keep_logs()

    def _keep_logs(self) -> None:
        """Move Ray's logs into our folder, replacing those of the previous session, and remove its sockets."""
        if self._ray_folder is None:
            return
        kept = self._folder / "ray-logs"
        shutil.rmtree(kept, ignore_errors=True)
        for logs in self._ray_folder.glob("session_2*/logs"):
            shutil.move(logs, kept)
        shutil.rmtree(self._ray_folder, ignore_errors=True)
