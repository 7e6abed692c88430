"""Owns how a test ends a process with all below it, and tells or waits whether others have ended.

Must not touch a process that the test did not start, directly or through others.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import suppress

import psutil

GONE_S = 10.0


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it, and wait until they are gone; harmless where it has ended.

    Raises AssertionError naming what is still there at the deadline, TimeoutExpired where that is the process itself.
    """
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()  # the first, lest it start others in place of those that end
    for process in below:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    process.wait(GONE_S)
    ends = time.monotonic() + GONE_S
    while left := [process for process in below if alive(process)]:
        assert time.monotonic() < ends, f"still there: {left}"
        time.sleep(0.05)


def alive(process: psutil.Process) -> bool:
    """Whether it runs. No zombie does: an orphan's is for the machine's first process to collect, if there is one."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


async def until_gone(pids: list[int], deadline_s: float) -> None:
    """Wait for processes to end; fails when one stays."""
    ends = time.monotonic() + deadline_s
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < ends, f"still there: {left}"
        await asyncio.sleep(0.1)
