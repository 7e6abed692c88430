"""Owns the end of a process with all its descendants, daemons included, and what keeps a text away from others.

Must not leave a process of a text running. On systems other than Linux a daemon that left its session escapes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

if sys.platform == "linux":  # here, because a function's own files come first where later imports look
    from landlockpy import AccessFS, AccessNet, LandlockError, Ruleset, Scope

END_S = 10.0
"""How long the descendants of a process are killed again and again, because they fork."""
CHILDREN = Path("/proc/thread-self/children")


def restrict_signals() -> str:
    """Let this process and its descendants signal and trace only each other; returns why not, or ''."""
    if sys.platform != "linux":
        return f"{sys.platform} has no Landlock"
    try:
        scoped = Scope.SIGNAL
        with Ruleset(handled_fs=AccessFS.NONE, handled_net=AccessNet.NONE, scoped=scoped, best_effort=False) as rules:
            rules.restrict()
    except (LandlockError, OSError, ValueError) as error:
        return f"Landlock cannot restrict signals: {error}"
    return ""


def kill_group(leader: int) -> None:
    """Kill the process group of a process that is not reaped yet, at once: none of the group can fork meanwhile."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_descendants() -> bool:
    """Kill and reap all descendants of this process. Returns False if some are left after END_S seconds.

    Only its own children are killed: their children become its own (`adopt_orphans`). Without a pause and from one
    small file, because a process that forks and ends all the time has to be met between the two.
    """
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        if not _reaped():
            return True
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
    return False


def _children() -> list[int]:
    try:
        return [int(child) for child in CHILDREN.read_text().split()]
    except OSError:  # another system, or a kernel without that file
        return [process.pid for process in psutil.Process().children()]


def _reaped() -> bool:
    """Reap the children that have ended; whether some still run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
