"""Owns the limits that a program's process puts on itself before it reads the program: they cannot be lifted.

Must not need anything but the C library: a jail has no libseccomp, so the filter arrives as a finished BPF program.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE
ALL = (1 << 13) - 1  # what Landlock's first version (Linux 5.13) can restrict
INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("instructions", ctypes.c_ushort), ("program", ctypes.c_void_p))


def set_process(option: int, value: int, pointer: object = 0) -> None:
    """prctl(option, value, pointer). Raises OSError."""
    last = pointer if isinstance(pointer, ctypes.c_void_p) else ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), last, ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl")


def filter_calls(program: bytes) -> None:
    """Filter this process's system calls with a BPF program. Raises OSError."""
    set_process(PR_SET_NO_NEW_PRIVS, 1)
    held = ctypes.create_string_buffer(program, len(program))
    described = _Filter(len(program) // INSTRUCTION_BYTES, ctypes.addressof(held))
    set_process(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(described)))


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> bool:
    """Allow only these paths, with all that is below them; returns False where the kernel has no Landlock."""
    created = ctypes.create_string_buffer(struct.pack("Q", ALL), 8)
    rules = _libc.syscall(LANDLOCK_CREATE_RULESET, created, ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    allowed = [(path, READ_FILE | READ_DIR | EXECUTE) for path in readable] + [(path, ALL) for path in writable]
    for path, access in allowed:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        valid = access if os.path.isdir(path) else access & OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", valid, place), 12)
        _checked(_libc.syscall(LANDLOCK_ADD_RULE, rules, RULE_PATH_BENEATH, rule, 0), "landlock_add_rule")
        os.close(place)
    set_process(PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return True


def limit_resources(limits: Mapping[str, int]) -> None:
    """Lower each RLIMIT_*, for this process and all that it starts."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def _checked(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
