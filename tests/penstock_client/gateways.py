"""Owns real gateways for the tests of the client: processes over the tests' Redis, with a token as a stack writes it.

Must not be used where access itself is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.api.access.local_token import VARIABLE, token_path, write_token
from tests.harness.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]


class LateGateway:
    """A gateway in a new process, which can be started late. Its token is where a stack of this machine writes it."""

    def __init__(self, redis_url: str, state: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._file = token_path(self.port, {"XDG_STATE_HOME": str(state)})
        self.token = write_token(self._file)
        self.runs = state / "runs"
        self._command = [sys.executable, "-m", "services.api", "--redis", redis_url, "--port", str(self.port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the gateway; it answers within seconds."""
        environment = {**os.environ, VARIABLE: str(self._file), "PENSTOCK_RUNS": str(self.runs)}
        self.process = subprocess.Popen(self._command, cwd=ROOT, env=environment)

    def stop(self) -> None:
        """Stop the gateway, if it was started."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise

    def get(self, path: str) -> httpx.Response:
        """What the gateway answers to a request with its token."""
        return httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {self.token}"}, timeout=20)

    def until_ready(self) -> None:
        """Wait until the gateway answers."""
        self.until(lambda: self._answers("/v1/runs"), "the gateway does not answer")

    def knows(self, run: str) -> bool:
        """Whether the gateway answers and has the run."""
        return self._answers(f"/v1/runs/{run}")

    def until(self, holds: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
        """Wait until the condition `holds`; fails with `what` at the deadline, or if the gateway has ended."""
        ends = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < ends, what
            assert self.process is None or self.process.poll() is None, "the gateway ended"
            time.sleep(0.1)

    def _answers(self, path: str) -> bool:
        try:
            return self.get(path).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_gateway(redis_url: str, state: Path) -> Iterator[LateGateway]:
    """A gateway that answers. While it runs, the commands of this process, and those it starts, find its token."""
    gateway = LateGateway(redis_url, state)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(state))
        try:
            gateway.start()
            gateway.until_ready()
            yield gateway
        finally:
            gateway.stop()
