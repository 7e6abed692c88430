"""Owns the tree of descendant processes: orphans stay in it, and all of it can be ended (Linux).

Must not touch a process that this one did not start, directly or indirectly.
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
    """Adopt descendants whose parent dies, instead of init, so that `end_descendants` finds them."""
    if _libc is not None and _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent() -> None:
    """Call in a child before exec: the child gets SIGTERM when its parent dies, for whatever reason."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants(spare: int | None = None) -> list[psutil.Process]:
    """All running descendants except zombies and the process `spare`."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if process.pid != spare and _running(process)]


def end_descendants(grace_s: float, spare: int | None = None) -> list[str]:
    """Terminate every descendant but the process `spare`, and kill those that remain after `grace_s` seconds.

    Returns the names of the killed processes; takes at most `grace_s` + 2 seconds.
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
        # Checked after the first kill, because this process may have been suspended in the meantime.
        if time.monotonic() > ends:
            break
    return killed


def reap() -> None:
    """Collect the exit statuses of all ended children, which would otherwise stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        log.debug("no children are left")


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
