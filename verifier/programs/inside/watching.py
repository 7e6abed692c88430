"""Owns the view of a supervisor on the processes below it: how many, their memory, their CPU time, and their end.

Must not count the supervisor itself.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PRIVATE = ("RssAnon:", "RssShmem:")
KIB = 1024
DEPTH = 8
INODES = 8192
"""The most files in a temporary folder: empty files take kernel memory that no size limits."""


class Usage(NamedTuple):
    """Of all processes below the supervisor: processes and threads, MiB of memory, CPU seconds (also of ended ones)."""

    processes: int
    memory_mib: float
    cpu_s: float


def usage(alone: bool) -> Usage:
    """What the processes below this one use. `alone`: all other processes of /proc are below this one."""
    processes, memory_kib, ticks = 0, 0, 0
    for pid in _below(alone):
        try:
            with open(f"/proc/{pid}/status") as status, open(f"/proc/{pid}/stat") as stat:
                fields = dict(line.split(None, 1) for line in status if line.startswith(("Rss", "Threads:")))
                times = stat.read().rpartition(")")[2].split()[11:15]
        except (OSError, ValueError):
            continue  # it ended
        processes += int(fields.get("Threads:", "1"))
        memory_kib += sum(int(fields[name].split()[0]) for name in PRIVATE if name in fields)
        ticks += sum(map(int, times))
    return Usage(processes, memory_kib / KIB, ticks / TICKS_PER_S + ended_cpu_s())


def ended_cpu_s() -> float:
    """CPU seconds of all processes that this one has reaped, and that those had reaped."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def reap() -> dict[int, int]:
    """Take every process that has ended: its id -> its status, as `os.waitpid` gives it."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_all(alone: bool) -> None:
    """Kill and reap every process below this one.

    The first process of a namespace does so in one call, which no process escapes by forking. Elsewhere the tree is
    killed until none is left. Raises RuntimeError when some are left after 10 s.
    """
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        if alone:
            _kill(-1)
        else:
            for pid in _below(alone):
                _kill(pid)
        reap()
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.001)  # some are dying
        except ChildProcessError:
            return
    raise RuntimeError("processes are left after 10 s of killing")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _below(alone: bool) -> Iterable[int]:
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    if alone:
        return [pid for pid in pids if pid != own]
    parents = {pid: parent for pid in pids if (parent := _parent(pid))}
    found = {own}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {own}


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def overfull(folders: Iterable[str], most_mib: float) -> bool:
    """Whether files fill the temporary folders, by size (MiB, over all folders) or by number."""
    used_mib = 0.0
    for folder in folders:
        found = os.statvfs(folder)
        used_mib += (found.f_blocks - found.f_bfree) * found.f_frsize / KIB / KIB
        if found.f_files - found.f_ffree > INODES:
            return True
    return used_mib > most_mib


def empty(folders: Iterable[str]) -> None:
    """Remove what a program left in the temporary folders, as far as it can be removed and is not nested deep."""
    for folder in folders:
        if not os.path.islink(folder):
            os.makedirs(folder, exist_ok=True)
            os.chmod(folder, 0o700)
            _remove_content(folder, DEPTH)


def _remove_content(folder: str, depth: int) -> None:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # the program took away its own rights
        return
    for entry in entries:
        try:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif depth:
                _remove_content(entry.path, depth - 1)
                os.rmdir(entry.path)
        except OSError:  # the same, or a folder that is not empty
            continue
