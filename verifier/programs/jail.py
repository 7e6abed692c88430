"""Owns one jail from outside: its start, one test at a time, and the end of every process in it.

Must not wait without a deadline, or leave a process behind, whatever ends the wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import psutil

from verifier.programs.isolation import IsolationChoice
from verifier.programs.jails.frames import FrameError, packed, read_frame
from verifier.programs.jails.places import PACKAGE, environment
from verifier.programs.jails.seccomp import FilterError
from verifier.programs.limits import ProgramLimits

log = logging.getLogger(__name__)

START_S = 20.0
"""How long a jail may take to start, and a supervisor to end a test after the program's time is over."""
END_S = 10.0
STOP_S = 1.0
FAULT_BYTES = 4096


class JailError(Exception):
    """A jail did not start, or ended on its own: no verdict on the program."""


class Jail:
    """A jail with one program, for use with `async with`: at its end every process of the jail is gone.

    `before` runs before `source`, in the same module. Raises JailError at the start.
    """

    def __init__(self, choice: IsolationChoice, source: str, before: str, limits: ProgramLimits) -> None:
        self._choice, self._limits = choice, limits
        self._program = (source, before)
        self._held = ExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._report: int | None = None
        self._first: int | None = None  # a descriptor of the jail's first process
        self._until = 0.0

    async def __aenter__(self) -> Jail:
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._end()

    async def run(self, case: Mapping[str, Any], unseen: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one test; returns the supervisor's frame. `unseen`: what only the checker gets. Raises JailError."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(packed(case) + (packed(unseen) if unseen is not None else b""))
        return await self._answer("to run a test")

    async def _start(self) -> None:
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-program-"))
        self._report, write = os.pipe()
        os.set_blocking(self._report, False)
        self._held.callback(os.close, self._report)
        self._until = time.monotonic() + self._limits.wall_s + START_S
        try:
            frame = self._choice.first_frame(*self._program, self._limits, folder)
            creating = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *self._choice.command(self._limits, write),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=environment(PACKAGE.parent),
                    cwd="/",
                    start_new_session=True,
                    pass_fds=(write,),
                    **self._choice.identity,
                )
            )
            try:
                self._process = await asyncio.shield(creating)
            except asyncio.CancelledError:  # a few milliseconds more: asyncio would leave half-made pipes open
                with suppress(OSError):
                    self._process = await creating
                raise
        except (OSError, FilterError) as error:
            raise JailError(f"{self._choice.isolation} does not start: {error}") from None
        finally:
            os.close(write)
        assert self._process.stdin is not None
        self._process.stdin.write(frame)
        await self._answer("to start")
        self._hold_first()

    def _hold_first(self) -> None:
        """Hold the jail's first process by a descriptor: its id could be another's by the time it is killed."""
        if self._first is not None or self._report is None:
            return
        with suppress(BlockingIOError, ProcessLookupError, ValueError, KeyError):
            self._first = os.pidfd_open(json.loads(os.read(self._report, FAULT_BYTES))["child-pid"])
            self._held.callback(os.close, self._first)

    async def _answer(self, what: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(max(0.0, self._until - time.monotonic())):
                return await read_frame(self._process.stdout)
        except TimeoutError:
            raise JailError(f"{self._choice.isolation} took too long {what}") from None
        except (FrameError, ConnectionError):
            raise JailError(f"{self._choice.isolation} failed {what}: {await self._fault()}") from None

    async def _fault(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                lines = (await self._process.stderr.read(FAULT_BYTES)).decode(errors="replace").strip().splitlines()
                return lines[-1][:300] if lines else f"it ended with status {await self._process.wait()}"
        return "it gave no reason"

    async def _end(self) -> None:
        try:
            if self._process is not None:
                await asyncio.shield(self._kill(self._process))
        finally:
            self._held.close()

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._hold_first()
        below = _tree(process.pid)
        with suppress(ProcessLookupError):
            if self._first is not None:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)  # and with it all processes of the jail
            elif self._choice.alone:
                below = await _stopped_tree(process)
                for each in below:  # bubblewrap's own child survives it if it is not yet set up
                    _kill(each)
                process.kill()
            else:
                process.terminate()  # the supervisor kills the tree
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("a jail did not end within %g s and is killed", END_S)
            for each in below:
                _kill(each)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process._transport is not None:  # type: ignore[attr-defined]
            process._transport.close()  # type: ignore[attr-defined]


async def _stopped_tree(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    """The processes below a process that is stopped first, so that it starts no other."""
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + STOP_S
    while time.monotonic() < until:
        try:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                break
        except psutil.NoSuchProcess:
            break
        await asyncio.sleep(0.001)
    return _tree(process.pid)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
