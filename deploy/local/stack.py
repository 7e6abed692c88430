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
from deploy.local.descendants import adopt_orphans, end_descendants, end_with_parent, reap
from deploy.local.preflight import StackError, check_folder, check_memory, check_model, check_port, check_redis
from deploy.local.valkey import EmbeddedValkey
from services.settings import Recipe
from services.streams.connection import redacted

log = logging.getLogger(__name__)

START_S = 120.0
# The head drains in 12 s and ends Ray in about 2 s; the whole stop stays below 20 s.
HEAD_STOP_S = 15.5
GRACE_S = 1.5
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
    """Everything that `penstock up` runs. Use as a context manager in a process's main thread."""

    def __init__(
        self, runs: Path, *, host: str = "127.0.0.1", port: int, redis_url: str | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:  # fmt: skip
        self.api = f"http://{host}:{port}"
        self.runs = runs.absolute()
        self.redis_url = redis_url
        self._address = (host, port)
        self._report = report
        self._folder = self.runs / ".stack"
        self._valkey: EmbeddedValkey | None = None
        self._head: subprocess.Popen[str] | None = None
        self._phases: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ray_folder: Path | None = None
        self._lock: IO[str] | None = None
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
            self._valkey = EmbeddedValkey(self._folder / "valkey")
            self.redis_url = self._valkey.start()
        self._start_head(self.redis_url)
        self._await_ready(began + START_S)
        self.seconds["start"] = time.monotonic() - began

    def _take_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"--runs: {self.runs} is in use by another stack; another folder is accepted") from None

    def _start_head(self, redis_url: str) -> None:
        host, port = self._address
        # Ray's socket paths may not exceed 107 characters, so its folder cannot lie below ours.
        self._ray_folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
        with (self._folder / "head.log").open("w") as errors:
            self._head = subprocess.Popen(
                [
                    sys.executable, "-m", "deploy.local.head", "--redis", redis_url, "--host", host,
                    "--port", str(port), "--cores", str(os.cpu_count() or 1), "--folder", str(self._ray_folder),
                ],
                env=head_environment("127.0.0.1", str(self.runs)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        assert self._head.stdout is not None
        threading.Thread(target=self._listen, args=(self._head.stdout,), daemon=True).start()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):
                self._phases.put(json.loads(line))

    def _await_ready(self, deadline: float) -> None:
        while True:
            phase = self._next_phase(deadline)
            if phase["phase"] == "ready":
                break
            if phase["phase"] == "failed":
                raise StackError(f"{phase['text']} (log: {self._folder / 'head.log'})")
            self._report(str(phase["text"]))
        while not self._api_ready():
            self._check_head()
            if time.monotonic() > deadline:
                raise StackError(f"the API at {self.api} was not ready within {START_S:g} s")
            time.sleep(0.1)

    def _next_phase(self, deadline: float) -> dict[str, Any]:
        while True:
            try:
                return self._phases.get(timeout=0.2)
            except queue.Empty:
                self._check_head()
                if time.monotonic() > deadline:
                    raise StackError(f"the stack was not ready within {START_S:g} s") from None

    def _api_ready(self) -> bool:
        try:
            return httpx.get(f"{self.api}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _check_head(self) -> None:
        if self._head is not None and self._head.poll() is not None:
            tail = (self._folder / "head.log").read_text().strip().splitlines()[-1:]
            raise StackError(f"Ray's head process ended with {self._head.returncode}: {''.join(tail)}")

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
        """Raises StackError when a part of the stack has ended by itself."""
        self._check_head()
        if self._valkey is not None and not self._valkey.alive:
            raise StackError(f"the embedded Redis ended; its log is {self._folder / 'valkey' / 'valkey.log'}")

    def stop(self) -> None:
        """Drain and end everything, within 20 s; afterwards this process has no descendant."""
        ignore_signals()
        began = time.monotonic()
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
        reap()
        if others:
            self._report(f"had to kill {', '.join(others)}")
        self._keep_logs()
        if self._lock is not None:
            self._lock.close()
        self.seconds["stop"] = time.monotonic() - began

    def _keep_logs(self) -> None:
        """Move Ray's logs into our folder, in place of the last session's, and remove its sockets."""
        if self._ray_folder is None:
            return
        kept = self._folder / "ray-logs"
        shutil.rmtree(kept, ignore_errors=True)
        for logs in self._ray_folder.glob("session_2*/logs"):
            shutil.move(logs, kept)
        shutil.rmtree(self._ray_folder, ignore_errors=True)
