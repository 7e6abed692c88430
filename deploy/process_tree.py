"""Owns the promise that nothing is left behind: every descendant stays ours, and is ended with us (Linux).

Must not touch a process that this one did not start, directly or through others.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time

import psutil

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Make descendants whose parent dies our children, instead of init's; nothing escapes `end_descendants`."""
    if _libc is not None and _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent() -> None:
    """In a child, before it executes: have SIGTERM sent when the parent dies, however it dies."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(spare: int | None = None) -> list[psutil.Process]:
    """Every process below this one that is not a zombie, and not the process `spare`."""
    return [one for one in psutil.Process().children(recursive=True) if one.pid != spare and _running(one)]


def end_descendants(grace_s: float, spare: int | None = None) -> list[str]:
    """Ask every descendant but the process `spare` to end, kill those that stay after `grace_s` seconds.

    Returns the names of the killed; takes at most `grace_s` + 2 seconds.
    """
    left = descendants(spare)
    for process in left:
        _signal(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(left, timeout=grace_s)
    killed: list[str] = []
    ends = time.monotonic() + 2.0
    while stubborn := descendants(spare):
        for process in stubborn:
            killed.append(_name(process))
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(stubborn, timeout=1.0)
        if time.monotonic() > ends:  # not before the first kill: this process may have stood still meanwhile
            break
    return killed


def reap() -> None:
    """Collect the exit statuses of ended children, also adopted ones: unread, they would stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        log.debug("no child is left")


def _running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}"


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        log.debug("pid %d had ended", process.pid)
