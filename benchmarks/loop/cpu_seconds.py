"""Owns the CPU time of a tree of processes, by role, at any moment of a measurement; also of processes that ended.

Must not start, end or slow down what it measures: it reads /proc once a second.

The kernel adds the time of a child that has ended to its parent when the parent collects it. So the time of a process
that lived between two looks is found there, under the role `ended`. A process that was seen is counted as it was seen
last. What it used after that is found at its parent too, unless the parent has the kernel collect its children (Ray's
raylet does), which loses the time since the last look.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import psutil

EVERY_S = 1.0
ENDED = "ended"
"""The role of processes that no look has seen alive."""
Key = tuple[int, float]
"""A process: its pid, and when it was created. Pids are used again."""


@dataclass(frozen=True)
class Seen:
    """A process at one look: its role, its parent, its own CPU seconds and those of the children that it collected."""

    role: str
    parent: int
    own_s: float
    children_s: float


@dataclass
class CpuAccount:
    """What the looks have found so far."""

    alive: dict[Key, Seen] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    """The CPU seconds of processes that have ended, by role, each as it was seen last."""
    credited: dict[Key, float] = field(default_factory=dict)
    """For a process that lives: the CPU seconds of its ended children that `gone` has already."""

    def look(self, found: Mapping[Key, Seen]) -> dict[str, float]:
        """Add a look: the whole tree as it is now. Returns the CPU seconds so far, by role."""
        for key in self.alive.keys() - found.keys():
            self._end(key, found)
        self.alive = dict(found)
        totals = dict(self.gone)
        for key, seen in found.items():
            totals[seen.role] = totals.get(seen.role, 0.0) + seen.own_s
            totals[ENDED] = totals.get(ENDED, 0.0) + self._unseen(key, seen)
        return totals

    def _end(self, key: Key, found: Mapping[Key, Seen]) -> None:
        seen = self.alive[key]
        unseen = self._unseen(key, seen)
        self.gone[seen.role] = self.gone.get(seen.role, 0.0) + seen.own_s
        self.gone[ENDED] = self.gone.get(ENDED, 0.0) + unseen
        collector = self._collector(seen.parent, found)
        if collector is not None:
            self.credited[collector] = self.credited.get(collector, 0.0) + seen.own_s + seen.children_s
        self.credited.pop(key, None)

    def _unseen(self, key: Key, seen: Seen) -> float:
        return max(0.0, seen.children_s - self.credited.get(key, 0.0))

    def _collector(self, pid: int, found: Mapping[Key, Seen]) -> Key | None:
        """The nearest ancestor that lives: an orphan is collected by one that adopts it."""
        living = {key[0]: key for key in found}
        parents = {key[0]: seen.parent for key, seen in self.alive.items()}
        while pid not in living:
            if pid not in parents:
                return None
            pid = parents[pid]
        return living[pid]


@dataclass(frozen=True)
class CpuSeries:
    """CPU seconds by role at each look. `at`: Unix seconds, increasing."""

    at: list[float] = field(default_factory=list)
    totals: list[dict[str, float]] = field(default_factory=list)

    def until(self, moment: float) -> dict[str, float]:
        """The CPU seconds up to a moment (Unix seconds), by role; between two looks a straight line is assumed.

        Before the first look there are none, and after the last one they stay as they were.
        """
        after = bisect_left(self.at, moment)
        if after == len(self.at):
            return dict(self.totals[-1]) if self.totals else {}
        if after == 0:
            return dict(self.totals[0]) if self.at[0] == moment else {}
        share = (moment - self.at[after - 1]) / (self.at[after] - self.at[after - 1])
        early, late = self.totals[after - 1], self.totals[after]
        return {role: early.get(role, 0.0) + share * (late[role] - early.get(role, 0.0)) for role in late}

    def between(self, start: float, end: float) -> dict[str, float]:
        """The CPU seconds between two moments, by role."""
        before = self.until(start)
        return {role: max(0.0, seconds - before.get(role, 0.0)) for role, seconds in self.until(end).items()}


class CpuMeter:
    """Looks at the tree below a process, and at the process itself, every EVERY_S seconds while it is entered.

    `role_of`: from the command line (or, where that is empty, the name) of a process to its role.
    """

    def __init__(self, root: int, role_of: Callable[[str], str], every_s: float = EVERY_S) -> None:
        self.series = CpuSeries()
        self._root = psutil.Process(root)
        self._role_of = role_of
        self._every_s = every_s
        self._account = CpuAccount()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="CPU meter", daemon=True)

    def __enter__(self) -> CpuMeter:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Look once; no effect if the process has ended."""
        at, found = time.time(), tree(self._root, self._role_of)
        if found:
            self.series.at.append(at)
            self.series.totals.append(self._account.look(found))

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self.look()


def tree(root: psutil.Process, role_of: Callable[[str], str]) -> dict[Key, Seen]:
    """A process and its descendants as they are now; those that end meanwhile are left out."""
    found: dict[Key, Seen] = {}
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for process in processes:
        try:
            with process.oneshot():
                times, parent, command = process.cpu_times(), process.ppid(), _command(process)
                key = (process.pid, process.create_time())
        except psutil.NoSuchProcess:
            continue
        children_s = times.children_user + times.children_system
        found[key] = Seen(role_of(command), parent, times.user + times.system, children_s)
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.ZombieProcess:
        return process.name()
