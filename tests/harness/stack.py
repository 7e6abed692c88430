"""Owns `penstock up` as tests run it: the process, its API and runs, and its descendants by role.

Must not end a process that it did not start, or import the code under test.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.harness.api_access import StackToken
from tests.harness.free_ports import free_port

READY_S = 270.0
RUN_S = 300.0
STOP_S = 60.0
BUSY_S = 60.0
FREEZE_S = 2.0
CANCEL_S = 120.0
ENDED = ("succeeded", "failed", "cancelled")
PR_SET_PDEATHSIG = 1
REDIS_URL = re.compile(r"redis://[^, ]+")


class StackDownError(RuntimeError):
    """The stack did not start, or stopped by itself; the text is its log."""


class Stack:
    """One stack in its own process. Use as a context manager. `folder` has its runs and its log.

    `environment`: more variables of its processes. `checkout`: the checkout of the repository whose code runs, with the
    installed packages of its own environment if it has one; default: what is installed where this process runs.
    """

    def __init__(
        self,
        folder: Path,
        redis_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        checkout: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        given = ["--redis", redis_url] if redis_url else []
        command = [str(command_of(checkout)), "up", "--port", str(self.port), "--runs", str(folder), *given]
        # `python -m`, which starts Ray's head, looks into its working directory first.
        paths = {"PYTHONPATH": str(checkout)} if checkout else {}
        self._log = folder / "up.log"
        with self._log.open("a") as log:
            self._begins = log.tell()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=checkout,
                env={**os.environ, **paths, **(environment or {})},
                start_new_session=True,
                preexec_fn=end_with_us,
            )
        self._given = redis_url
        self.left: list[str] = []
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, auth=StackToken(self.port))

    def __enter__(self) -> Stack:
        try:
            self._await_ready()
        except BaseException:  # Ctrl-C too: started processes must be stopped
            self.stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    @property
    def output(self) -> str:
        """The output of this stack so far."""
        return self._log.read_text()[self._begins :]

    @property
    def redis_url(self) -> str:
        """The URL of its Redis: the given one, or what `penstock up` prints of its own, with the password."""
        if self._given is not None:
            return self._given
        match = REDIS_URL.search(self.output)
        if match is None:
            raise StackDownError(self.output)
        return match[0].replace("//", f"//:{self.redis_password.read_text()}@", 1)

    @property
    def redis_password(self) -> Path:
        """The file with the password of its own Redis."""
        return self.folder / ".stack" / "valkey" / "password"

    def _await_ready(self) -> None:
        ends = time.monotonic() + READY_S
        while not (self.answers() and (self._given or REDIS_URL.search(self.output))):
            self.check()
            if time.monotonic() > ends:
                raise StackDownError(f"not ready within {READY_S:g} s\n{self.output}")
            time.sleep(0.2)

    def check(self) -> None:
        """Raises StackDownError if the stack has stopped."""
        if self.process.poll() is not None:
            raise StackDownError(f"`penstock up` exited with {self.process.returncode}\n{self.output[-4000:]}")

    def answers(self, path: str = "/readyz") -> bool:
        """Whether the API answers this request with 200 now."""
        try:
            return self.api.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def submit(self, document: dict[str, Any], run: str | None = None) -> str:
        """Submit a run, under id `run` if given; returns its id."""
        answer = self.api.post("/v1/runs", json={"recipe": document} | ({"id": run} if run else {}))
        if answer.status_code != 201:
            raise StackDownError(f"submitting the run failed: {answer.status_code} {answer.text}")
        return str(answer.json()["id"])

    def view(self, run: str) -> dict[str, Any]:
        """The API's view of a run. On a busy machine Redis may miss the API's deadline: a 503 is asked again."""
        ends = time.monotonic() + BUSY_S
        while (answer := self.api.get(f"/v1/runs/{run}")).status_code == 503 and time.monotonic() < ends:
            time.sleep(1)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def until(
        self, run: str, holds: Callable[[dict[str, Any]], bool], what: str, deadline_s: float = RUN_S
    ) -> dict[str, Any]:
        """Wait until `holds` is true of the run's view; returns the view. A failed or cancelled run fails the test."""
        ends = time.monotonic() + deadline_s
        while not holds(view := self.view(run)):
            shown = json.dumps({**view, "recipe": None}, indent=1)[-6000:]
            assert view["state"] not in ("failed", "cancelled"), f"{what}: the run {view['state']}\n{shown}"
            assert time.monotonic() < ends, f"{what} did not happen within {deadline_s} s\n{shown}"
            time.sleep(0.3)
        return view

    @contextmanager
    def paused(self, run: str) -> Iterator[None]:
        """Pause a run during the body: a short run may end before a replica has started."""
        self.api.post(f"/v1/runs/{run}/pause").raise_for_status()
        try:
            yield
        finally:
            self.api.post(f"/v1/runs/{run}/resume").raise_for_status()

    def steps(self, run: str) -> list[dict[str, Any]]:
        """The run's rollout steps."""
        found: list[dict[str, Any]] = self.api.get(f"/v1/runs/{run}/metrics").json()["steps"]
        return found

    def cancel_all(self) -> None:
        """Cancel the runs that an interrupted stack left in its Redis, and wait until they have ended."""
        ends = time.monotonic() + CANCEL_S
        while left := [run for run in self.api.get("/v1/runs").json()["runs"] if run["state"] not in ENDED]:
            if time.monotonic() > ends:
                raise StackDownError(f"not cancelled within {CANCEL_S:g} s: {[run['id'] for run in left]}")
            for run in left:
                self.api.post(f"/v1/runs/{run['id']}/cancel")
            time.sleep(1.0)

    def below(self) -> list[psutil.Process]:
        """Every process of the stack except the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def gateway(self) -> int | None:
        """The process of the controller and the API; None while it is down."""
        return next((process.pid for process in self.below() if "ray::Gateway" in _title(process)), None)

    def head(self) -> int | None:
        """Ray's head process, which owns all others except Redis; None while it is down."""
        own = psutil.Process(self.process.pid).children()
        return next((process.pid for process in own if "deploy.local.head" in _title(process)), None)

    def redis(self) -> int | None:
        """The embedded server's process; None while it is down, or if the stack uses another server."""
        own = psutil.Process(self.process.pid).children()
        return next((process.pid for process in own if "valkey-server" in _title(process)), None)

    def stop(self) -> None:
        """Stop the stack. Processes that it left behind are listed in `left` and killed."""
        self.api.close()
        if self.process.poll() is not None:
            return
        everything = self.below()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)
        for process in everything:
            if _alive(process):
                self.left.append(f"pid {process.pid}: {_title(process)}")
                send(process.pid, signal.SIGKILL)


def command_of(checkout: Path | None) -> Path:
    """The command `penstock` of a checkout's own environment, or else of this process's."""
    own = None if checkout is None else checkout / ".venv" / "bin" / "penstock"
    return own if own is not None and own.exists() else Path(sys.executable).parent / "penstock"


def end_with_us() -> None:
    """In a child before exec: have the kernel send it SIGTERM when its parent dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def engine_core(replica: int) -> int | None:
    """vLLM's EngineCore below a rollout replica's process: the child that has a worker."""
    try:
        children = psutil.Process(replica).children()
        return next(
            (process.pid for process in children if "EngineCore" in _title(process) or process.children()), None
        )
    except psutil.NoSuchProcess:
        return None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def freeze(pid: int) -> bool:
    """Stop a process and wait until it has stopped; False if it is gone, or does not stop within FREEZE_S seconds."""
    if not send(pid, signal.SIGSTOP):
        return False
    ends = time.monotonic() + FREEZE_S
    while time.monotonic() < ends:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return True
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.0005)
    send(pid, signal.SIGCONT)
    return False


def exists(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return _alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
