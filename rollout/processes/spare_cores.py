"""Owns how many threads an engine on CPUs computes with: its own, and more while cores are idle.

Must not set them; the worker does, between two decoding steps.

The rule looks at the last second. More threads: the engine was busy, and a core was idle. Its own number again: its
threads waited for processors, because something else began to compute, or the engine was idle itself.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

BUSY = 0.6
"""Of each thread's time: what an engine computes at least that gets more threads."""
IDLE = 0.6
"""Of a core's time: what it is idle at least to be used."""
WAITED, FREE = 0.35, 0.15
"""Of a second: an engine gives cores back when its threads waited longer for processors, and no core was idle so long.
OpenMP's threads sleep between operations, so that they also wait a little beside an idle core."""
HOLD_S = 3.0
"""How long an engine keeps to its own threads after it had to give others back."""
SELF, TASKS = Path("/proc/self/schedstat"), Path("/proc/self/task")


@dataclass(frozen=True)
class CoreUsage:
    """What the machine and this process have used so far, in seconds.

    at: the clock. idle: of the cores that this process may use, together. computed: by this process's threads. waited:
    by these, for a processor.
    """

    at: float
    idle: float
    computed: float
    waited: float

    @classmethod
    def now(cls) -> CoreUsage | None:
        """That of this moment. None, and once a log line, where the kernel does not count waits (CONFIG_SCHED_INFO)."""
        if not _counts_waits():
            return None
        cores = psutil.cpu_times(percpu=True)
        idle = sum(cores[core].idle for core in os.sched_getaffinity(0))
        return cls(time.monotonic(), idle, time.process_time(), sum(map(_waited_s, os.listdir(TASKS))))


@cache
def _counts_waits() -> bool:
    found = SELF.exists()
    if not found:
        log.warning("rollout.max_threads has no effect: this kernel has no %s", SELF)
    return found


def _waited_s(thread: str) -> float:
    """The seconds for which a thread could have run, but had no processor; 0 once it has ended."""
    try:
        return int((TASKS / thread / "schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


class SpareCores:
    """The number of threads over time; `least` are the engine's own, and it uses at most `most`."""

    def __init__(self, least: int, most: int, usage: CoreUsage) -> None:
        self.threads = least
        self._least, self._most = least, most
        self._before = usage
        self._hold_until = usage.at

    def next(self, usage: CoreUsage) -> int:
        """The number until the next look, by the usage since the last one."""
        before, self._before = self._before, usage
        seconds = usage.at - before.at
        if seconds <= 0:
            return self.threads
        idle, computed, waited = (
            (getattr(usage, name) - getattr(before, name)) / seconds for name in ("idle", "computed", "waited")
        )
        if self.threads > self._least and waited > WAITED and idle < FREE:
            self.threads, self._hold_until = self._least, usage.at + HOLD_S
        elif computed < BUSY * self._least:
            self.threads = self._least
        elif idle >= IDLE and usage.at >= self._hold_until:
            self.threads = min(self._most, self.threads + max(1, int(idle)))
        return self.threads
