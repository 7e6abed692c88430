"""Owns the CPU time of a tree of processes, by role, at any moment of a measurement; also of processes that ended.

Must not start, end or slow down what it measures: it reads /proc once a second.

The kernel adds the time of a child that has ended to its parent when the parent collects it. So the time of a child
that lived between two looks is found at its parent, and is counted as the parent's. A process that was seen is counted
as it was seen last. What it used after that is found at its parent too, unless the parent has the kernel collect its
children (Ray's raylet does), which loses the time since the last look.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import psutil

EVERY_S = 1.0
Key = tuple[int, float]
"""A process: its pid, and when it was created. Pids are used again."""


@dataclass(frozen=True)
class Seen:
    """A process at one look: its parent, its own CPU seconds, those of the children that it collected, its command."""

    parent: int
    own_s: float
    children_s: float
    command: str = ""


@dataclass
class CpuAccount:
    """What the looks have found so far."""

    alive: dict[Key, Seen] = field(default_factory=dict)
    gone: dict[Key, float] = field(default_factory=dict)
    """The CPU seconds of processes that have ended, each as it was seen last."""
    credited: dict[Key, float] = field(default_factory=dict)
    """For a process that lives: the CPU seconds of its ended children that `gone` has already."""

    def look(self, found: Mapping[Key, Seen]) -> dict[Key, float]:
        """Add a look: the whole tree as it is now. Returns the CPU seconds so far of every process that was seen."""
        for key in self.alive.keys() - found.keys():
            self._end(key, found)
        self.alive = dict(found)
        return self.gone | {key: self._seconds(key, seen) for key, seen in found.items()}

    def _seconds(self, key: Key, seen: Seen) -> float:
        """A process's own time, and that of its children that no look has seen."""
        return seen.own_s + max(0.0, seen.children_s - self.credited.get(key, 0.0))

    def _end(self, key: Key, found: Mapping[Key, Seen]) -> None:
        seen = self.alive[key]
        self.gone[key] = self._seconds(key, seen)
        collector = self._collector(seen.parent, found)
        if collector is not None:
            self.credited[collector] = self.credited.get(collector, 0.0) + seen.own_s + seen.children_s

    def _collector(self, pid: int, found: Mapping[Key, Seen]) -> Key | None:
        """The nearest ancestor that lives: an orphan is collected by one that adopts it."""
        living = {key[0]: key for key in found}
        parents = {key[0]: seen.parent for key, seen in self.alive.items()}
        while pid not in living:
            if pid not in parents:
                return None
            pid = parents[pid]
        return living[pid]


@dataclass
class CpuSeries:
    """CPU seconds of each process at each look. `at`: Unix seconds, increasing. `roles`: of the processes."""

    at: list[float] = field(default_factory=list)
    seconds: list[dict[Key, float]] = field(default_factory=list)
    roles: dict[Key, str] = field(default_factory=dict)

    def until(self, moment: float) -> dict[str, float]:
        """The CPU seconds up to a moment (Unix seconds), by role; between two looks a straight line is assumed.

        Before the first look there are none, and after the last one they stay as they were.
        """
        after = bisect_left(self.at, moment)
        if after == len(self.at):
            return self._by_role(self.seconds[-1]) if self.at else {}
        if after == 0:
            return self._by_role(self.seconds[0]) if self.at[0] == moment else {}
        share = (moment - self.at[after - 1]) / (self.at[after] - self.at[after - 1])
        early, late = self.seconds[after - 1], self.seconds[after]
        return self._by_role({key: early.get(key, 0.0) + share * (late[key] - early.get(key, 0.0)) for key in late})

    def between(self, start: float, end: float) -> dict[str, float]:
        """The CPU seconds between two moments, by role."""
        before = self.until(start)
        return {role: seconds - before.get(role, 0.0) for role, seconds in self.until(end).items()}

    def _by_role(self, seconds: Mapping[Key, float]) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for key, spent in seconds.items():
            found[self.roles[key]] += spent
        return dict(found)


@dataclass
class Roles:
    """The roles of processes. `role_of`: from a command line to a role, "" if it tells none.

    A role that was given by pid stays; else the last one counts that the command line told, which may change; else the
    parent's.
    """

    role_of: Callable[[str], str]
    found: dict[Key, str] = field(default_factory=dict)
    _given: set[Key] = field(default_factory=set)
    _told: set[Key] = field(default_factory=set)

    def look(self, tree: Mapping[Key, Seen], given: Mapping[int, str]) -> None:
        """Add a look. `given`: roles by pid."""
        living = {key[0]: key for key in tree}
        for key, seen in tree.items():  # parents come before their children
            if key[0] in given:
                self.found[key] = given[key[0]]
                self._given.add(key)
            elif key in self._given:
                continue
            elif role := self.role_of(seen.command):
                self.found[key] = role
                self._told.add(key)
            elif key not in self._told:
                parent = living.get(seen.parent)
                self.found[key] = self.found.get(parent, "") if parent else self.found.get(key, "")


class CpuMeter:
    """Looks at the tree below a process, and at the process itself, every EVERY_S seconds while it is entered."""

    def __init__(self, root: int, roles: Roles, every_s: float = EVERY_S) -> None:
        self.series = CpuSeries(roles=roles.found)
        self._root = psutil.Process(root)
        self._roles = roles
        self._every_s = every_s
        self._account = CpuAccount()
        self._named: dict[int, str] = {}
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

    def name(self, roles: Mapping[int, str]) -> None:
        """The roles of processes by pid, from now on."""
        self._named = dict(roles)

    def look(self) -> None:
        """Look once; no effect if the process has ended. Not from two threads at a time."""
        at, found = time.time(), tree(self._root)
        if found:
            self._roles.look(found, self._named)
            self.series.seconds.append(self._account.look(found))
            self.series.at.append(at)

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self.look()


def tree(root: psutil.Process) -> dict[Key, Seen]:
    """A process and its descendants as they are now, parents first; those that end meanwhile are left out."""
    found: dict[Key, Seen] = {}
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return found
    for process in processes:
        try:
            with process.oneshot():
                times, parent, key = process.cpu_times(), process.ppid(), (process.pid, process.create_time())
                command = _command(process)
        except psutil.NoSuchProcess:
            continue
        children_s = times.children_user + times.children_system
        found[key] = Seen(parent, times.user + times.system, children_s, command)
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.ZombieProcess:
        return ""
