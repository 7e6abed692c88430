"""Owns the server's side of one function: its process is started once, and each text gets a process forked from it.

Must not trust what a text's process writes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verifier.processes.group import GroupLeader
from verifier.remote.functions.files import Layout

log = logging.getLogger(__name__)

PASSED = ("HOME", "LANG", "PATH", "TMPDIR", "TZ")
USER_PREFIX = "USER_REWARD_"
"""Variables with this prefix are yours: functions get them."""
REPLY_BYTES = 65536
START_S = 60.0
MOST_START_S = 600.0
FORK_S = 10.0
GRACE_S = 15.0
"""Beyond the deadline of a text, within which its keeper ends its processes."""
STOP_S = 10.0


class FunctionFailedError(Exception):
    """A function gave no result for a text. One line: file, function and why."""


@dataclass(frozen=True)
class TextLimits:
    """Of the processes of one text: CPU seconds (rounded up) of each, and wall-clock seconds of all."""

    cpu_s: float = 10.0
    wall_s: float = 30.0


def user_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a function's processes: those in PASSED, those that start with USER_PREFIX, the module path."""
    passed = {name: value for name, value in environ.items() if name in PASSED or name.startswith(USER_PREFIX)}
    return passed | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class WarmFunction:
    """One function whose file is imported. Raises OSError when its process cannot be started."""

    def __init__(self, name: str, contents: Mapping[str, bytes], start_s: float = START_S) -> None:
        self._name = name
        self._start_s = start_s
        self._layout = Layout(contents)
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        command = [sys.executable, "-P", "-m", "verifier.remote.functions.host"]
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(self._layout.folder), name],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=user_environment(os.environ),
                cwd=self._layout.folder,
                start_new_session=True,
            )
        self._leader = GroupLeader(process)
        self._forking = asyncio.Lock()
        self._judging = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def usable(self) -> bool:
        """Whether its process runs and its files are as they were."""
        return self._leader.runs() and self._layout.intact()

    async def ready(self) -> None:
        """Wait until its file is imported. Raises FunctionFailedError."""
        try:
            told = await self._told(self._start_s)
        except TimeoutError:
            raise self._failed(f"its import took longer than {self._start_s:g} s") from None
        if told is None:
            raise self._failed(f"its process ended during the import ({await self._exit()})")
        if told["fault"]:
            raise self._failed(told["fault"])
        if told["gap"]:
            log.warning(
                "%s: a text that runs code can signal other processes of this user: %s", self._name, told["gap"]
            )

    async def judge(self, request: Mapping[str, Any], limits: TextLimits) -> dict[str, Any]:
        """What the function returned for a request, in a process of its own. Raises FunctionFailedError."""
        channel, theirs = socket.socketpair()
        ended, end = os.pipe()
        self._judging += 1
        self._idle.clear()
        try:
            with theirs:
                try:
                    await self._fork(theirs, end, limits)
                finally:
                    os.close(end)
            return await self._reply(channel, ended, request, limits)
        finally:  # closing the pipe ends the text's processes if they still run
            channel.close()
            os.close(ended)
            self._judging -= 1
            if not self._judging:
                self._idle.set()

    async def close(self) -> None:
        """End its process and remove its files, once it judges no text any more."""
        await self._idle.wait()  # each text has a deadline
        self._control.close()
        await asyncio.to_thread(self._leader.end)
        await asyncio.to_thread(self._layout.remove)

    async def _fork(self, channel: socket.socket, end: int, limits: TextLimits) -> None:
        message = json.dumps({"cpu_s": limits.cpu_s, "wall_s": limits.wall_s}).encode()
        async with self._forking:
            try:
                socket.send_fds(self._control, [message], [channel.fileno(), end])
                told = await self._told(FORK_S)
            except asyncio.CancelledError:
                self._leader.end()  # its answer would be taken for that to the next request
                raise
            except (OSError, TimeoutError) as error:
                self._leader.end()
                raise self._failed(
                    f"no process could be forked for the text: {error or f'within {FORK_S:g} s'}"
                ) from None
        if told is None:
            raise self._failed(f"the process that imported it ended ({await self._exit()})")

    async def _reply(
        self, channel: socket.socket, ended: int, request: Mapping[str, Any], limits: TextLimits
    ) -> dict[str, Any]:
        patience_s = limits.wall_s + GRACE_S
        try:
            async with asyncio.timeout(patience_s), asyncio.TaskGroup() as tasks:
                exchange = tasks.create_task(_exchanged(channel, json.dumps(request).encode()))
                told = tasks.create_task(_read_pipe(ended))
        except TimeoutError:
            raise self._failed(f"the processes of the text did not end within {patience_s:g} s") from None
        if not told.result():
            raise self._failed("the process that watches the text was killed")
        end = json.loads(told.result())
        if not end["whole"]:
            log.error("%s: processes of a text could not be killed", self._name)
        return self._judged(end, exchange.result(), limits)

    def _judged(self, end: Mapping[str, Any], reply: bytes, limits: TextLimits) -> dict[str, Any]:
        cpu_s, code = math.ceil(limits.cpu_s), end["code"]
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and end["cpu_s"] >= cpu_s):
            raise self._failed(f"it used more than {cpu_s} s of CPU time and was killed")
        if not end["in_time"]:
            raise self._failed(f"it took longer than {limits.wall_s:g} s and was killed")
        if code < 0:
            raise self._failed(f"its process was killed by signal {-code} ({signal.strsignal(-code)})")
        try:
            found = json.loads(reply) if len(reply) < REPLY_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._failed(f"its process ended without a result (status {code})")
        if isinstance(found.get("error"), str):
            raise self._failed(found["error"])
        return found

    async def _told(self, patience_s: float) -> dict[str, Any] | None:
        """The next message of its process; None if it has ended."""
        line = b""
        async with asyncio.timeout(patience_s):
            while not line.endswith(b"\n"):
                try:
                    part = await asyncio.get_running_loop().sock_recv(self._control, REPLY_BYTES)
                except ConnectionError:
                    part = b""
                if not part:
                    return None
                line += part
        told: dict[str, Any] = json.loads(line)
        return told

    async def _exit(self) -> str:
        await asyncio.to_thread(self._leader.wait, STOP_S)
        code = await asyncio.to_thread(self._leader.end)
        return f"status {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"

    def _failed(self, why: str) -> FunctionFailedError:
        return FunctionFailedError(f"{self._name}: {why}")


async def _exchanged(channel: socket.socket, request: bytes) -> bytes:
    """Write a request and read its reply, of which the first REPLY_BYTES are kept."""
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    reply = b""
    with suppress(ConnectionError):  # its keeper says how the process ended
        await loop.sock_sendall(channel, request)
        channel.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):
        while part := await loop.sock_recv(channel, REPLY_BYTES):
            reply = (reply + part)[:REPLY_BYTES]
    return reply


async def _read_pipe(descriptor: int) -> bytes:
    """All that is written into a pipe, until its last writer closes it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    found = b""
    try:
        while True:
            await readable.wait()
            readable.clear()
            try:
                part = os.read(descriptor, REPLY_BYTES)
            except BlockingIOError:
                continue
            if not part:
                return found
            found += part
    finally:
        loop.remove_reader(descriptor)
