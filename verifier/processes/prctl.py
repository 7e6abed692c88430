"""Owns the settings of this process in the kernel: whose end ends it, whose orphans it adopts, who may inspect it.

Must not be used in a confined process, where prctl is forbidden. Has no effect on other systems than Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends; exit now if `parent` has died. Raises OSError."""
    _set(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the setting took effect


def deny_inspection() -> None:
    """Deny other processes of this user access to this one's memory and environment (/proc/PID/mem, /proc/PID/environ).

    Debuggers and profilers, which use the same files, need root afterwards. Raises OSError.
    """
    _set(PR_SET_DUMPABLE, 0)


def permit_inspection() -> None:
    """Give this process its /proc/self back, which a forked child of an uninspectable process lacks. Raises OSError."""
    _set(PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends. Raises OSError."""
    _set(PR_SET_CHILD_SUBREAPER, 1)


def _set(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
