"""Owns a stack without Ray and engines: the gateway and the processes of its runs, each replaced when it dies.

Must not end a process that it did not start, or import the code under test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.harness.api_access import HEADERS
from tests.harness.free_ports import free_port
from tests.harness.stack import StackDownError, end_with_us, send

ROOT = Path(__file__).parents[3]
KEEP_S = 0.05
"""How often dead processes are replaced, and the wishes of the gateway read."""
READY_S = 60.0
STOP_S = 12.0
WANTED = ".wanted"
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "sampler": ("services.sampler",),
    "verifier": ("verifier",),
    "rollout": ("tests.harness.stubs.rollout",),
    "learner": ("tests.harness.stubs.learner",),
}
"""The command of each service; `StubStack.programs` may replace it and add arguments."""


@dataclass
class Kept:
    """A process that is started again when it dies. `started`: how often it was, and `at`: when last (Unix seconds)."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: int = 0
    at: float = 0.0

    @property
    def pid(self) -> int | None:
        """Its pid; None while it is down."""
        running = self.process is not None and self.process.poll() is None
        return self.process.pid if self.process is not None and running else None

    def keep(self) -> None:
        """Start it if it is down."""
        if self.pid is None:
            self.at, self.started = time.time(), self.started + 1
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    env=self.environment,
                    preexec_fn=end_with_us,
                )

    def drain(self) -> None:
        """Ask it to end."""
        if self.pid is not None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                send(self.pid, number)

    def stop(self, deadline_s: float) -> bool:
        """Drain it; it is killed after `deadline_s` seconds. Whether it ended by itself."""
        if self.process is None:
            return True
        self.drain()
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True


@dataclass
class StubStack:
    """One stack. Use as a context manager. `folder` has its runs and their logs; `redis_url` must answer.

    `arguments`: more of a service's command line, by service; `programs`: another program in place of a service's own.
    """

    folder: Path
    redis_url: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    redis_pid: Callable[[], int | None] = lambda: None
    """The server's process, if this stack may kill it and something else restarts it."""
    held: frozenset[str] = frozenset()
    """Services that are not started although a run wants them; change it with `hold`."""

    def __post_init__(self) -> None:
        self.port = free_port()
        self.left: list[str] = []
        (self.folder / WANTED).mkdir(parents=True, exist_ok=True)
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, headers=HEADERS)
        self._lock = threading.RLock()
        self._runs: dict[str, dict[str, Kept]] = {}
        self._closing = threading.Event()
        self._broken: Exception | None = None
        self._keeper = threading.Thread(target=self._keep, name="stub stack", daemon=True)
        address = ["--redis", self.redis_url, "--port", str(self.port), "--runs", str(self.folder.absolute())]
        self._gateway = self._kept("gateway", ["tests.harness.stubs.gateway", *address], self.folder)

    def _kept(self, name: str, module: list[str], logs: Path) -> Kept:
        logs.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PENSTOCK_RUNS": str(self.folder.absolute()),
            # The model of a stub run is nowhere; without pytest nothing has set the roots yet.
            "PENSTOCK_ROOTS": os.environ.get("PENSTOCK_ROOTS", f"{self.folder.absolute().parent},/none"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        return Kept(name, [sys.executable, "-m", *module], logs / f"{name}.log", environment)

    def __enter__(self) -> StubStack:
        self._keeper.start()
        try:
            ends = time.monotonic() + READY_S
            while not self.answers():
                self.check()
                if time.monotonic() > ends:
                    raise StackDownError(f"not ready within {READY_S:g} s; see {self.folder / 'gateway.log'}")
                time.sleep(0.05)
        except BaseException:  # Ctrl-C too: started processes must be stopped
            self.stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def _keep(self) -> None:
        while not self._closing.wait(KEEP_S):
            try:
                with self._lock:
                    self._gateway.keep()
                    self._follow_wishes()
            except Exception as error:  # noqa: BLE001 - `check` raises it in the test's own thread
                self._broken = error
                return

    def _follow_wishes(self) -> None:
        wished = {path.stem: json.loads(path.read_text()) for path in (self.folder / WANTED).glob("*.json")}
        for run in {*wished, *self._runs}:
            names = {
                f"{service}-{number}": service
                for service, count in wished.get(run, {}).items()
                for number in range(count)
                if service not in self.held
            }
            kept = self._runs.setdefault(run, {})
            obsolete = [kept.pop(name) for name in list(kept) if name not in names]
            for each in obsolete:
                each.drain()
            for each in obsolete:
                each.stop(STOP_S)
            for name, service in names.items():
                if name not in kept:
                    kept[name] = self._kept(name, self._command(service, run), self.folder / run / "logs")
                kept[name].keep()
            self._report(run, kept)

    def _command(self, service: str, run: str) -> list[str]:
        program = self.programs.get(service, PROGRAMS[service])
        return [*program, *self.arguments.get(service, ()), "--run", run, "--redis", self.redis_url]

    def _report(self, run: str, kept: dict[str, Kept]) -> None:
        pids: dict[str, list[int]] = {}
        for name, each in kept.items():
            if each.pid is not None:
                pids.setdefault(name.rpartition("-")[0], []).append(each.pid)
        partial = self.folder / WANTED / f"{run}.pids.new"
        partial.write_text(json.dumps(pids))
        partial.replace(self.folder / WANTED / f"{run}.pids")

    def hold(self, *services: str) -> None:
        """From now on, run every service but these; returns when they have ended."""
        with self._lock:
            self.held = frozenset(services)
            self._follow_wishes()

    def processes(self, run: str) -> dict[str, Kept]:
        """The run's processes and the gateway, by name."""
        with self._lock:
            return {**self._runs.get(run, {}), "gateway": self._gateway}

    def check(self) -> None:
        """Raises StackDownError if processes are no longer kept."""
        if self._broken is not None:
            raise StackDownError(f"the stub stack stopped: {self._broken!r}") from self._broken

    def answers(self, path: str = "/readyz") -> bool:
        """Whether the API answers this request with 200 now."""
        try:
            return self.api.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def submit(self, document: dict[str, Any], run: str) -> str:
        """Submit a run under id `run`."""
        answer = self.api.post("/v1/runs", json={"recipe": document, "id": run})
        if answer.status_code != 201:
            raise StackDownError(f"submitting the run failed: {answer.status_code} {answer.text}")
        return run

    def gateway(self) -> int | None:
        """The process of the controller and the API; None while it is down."""
        return self._gateway.pid

    def head(self) -> int | None:
        """There is no Ray."""
        return None

    def redis(self) -> int | None:
        """The server's process; None while it is down, or if it must not be killed."""
        return self.redis_pid()

    def stop(self) -> None:
        """Stop every process."""
        self.api.close()
        self._closing.set()
        if self._keeper.ident is not None:
            self._keeper.join(2 * STOP_S)
        with self._lock:
            for run, kept in self._runs.items():
                self.left += [f"{run}: {name}" for name, each in kept.items() if not each.stop(STOP_S)]
            self._gateway.stop(STOP_S)
