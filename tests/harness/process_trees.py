"""Owns the killing of a test's process tree, and the wait for processes to exit.

Must not touch a process that the test did not start, directly or indirectly.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import suppress

import psutil

GONE_S = 10.0


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, and wait until they are gone; no effect if it has exited.

    Raises AssertionError with the processes left at the deadline, TimeoutExpired if the process itself is left.
    """
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()  # first, so that it does not start replacements
    for descendant in below:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait(GONE_S)
    ends = time.monotonic() + GONE_S
    while left := [descendant for descendant in below if alive(descendant)]:
        assert time.monotonic() < ends, f"still running: {left}"
        time.sleep(0.05)


def alive(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie does not: an orphan stays a zombie if no init process collects it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended, collected or not."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is one, too
        return ""


def _runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


async def until_gone(pids: list[int], deadline_s: float) -> None:
    """Wait for processes to exit; fails if one does not."""
    ends = time.monotonic() + deadline_s
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < ends, f"still running: {left}"
        await asyncio.sleep(0.1)
