"""Owns the two things that a process tells the kernel about itself here: with whom it ends, who may look into it.

Must not be told to a judging process that is confined: prctl is forbidden there. Does nothing on systems but Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; at once if `parent` is no more. Raises OSError."""
    _tell(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we could be bound to it


def close_to_others() -> None:
    """Keep other processes of this user out of this one's memory and environment (/proc/PID/mem, /proc/PID/environ).

    Debuggers and profilers, which look in the same way, need root from here on. Raises OSError.
    """
    _tell(PR_SET_DUMPABLE, 0)


def _tell(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
