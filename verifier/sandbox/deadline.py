"""Owns the time of a judgement: CPU seconds of the judging process, and a larger bound on the clock.

Must not kill anything.

On a busy machine a judgement takes long on the clock, and is not wrong or late for it. The clock ends what sleeps.
"""

from __future__ import annotations

import math
import select
import sys
import time

LEAST_LOOK_S, LOOK_S = 0.001, 0.05
"""The pause between two looks at the CPU time of a process that has not answered."""
SLOW_WALL_S = 0.25
"""A judgement takes long from so many seconds on the clock, whatever its CPU time."""
SLOW_FACTOR, LEAST_SLOW_S, MOST_SLOW_S = 12.0, 0.001, 0.25
"""A judgement takes long from so many times the usual one, at least and at most so many CPU seconds."""
MOST_STOPPED = 10
"""How often the seconds on the clock of a judgement may pass while its process is stopped for other texts."""
REMEMBERED = 32
"""How many judgements the usual one is made of, about: newer ones count more."""
CPUCLOCK_SCHED = 2
"""Linux's clock of a process's CPU time: the id is made of the process id (clock_getcpuclockid in the C library)."""


class Clock:
    """The CPU seconds of a process; -1 where they are unknown."""

    def __init__(self, pid: int) -> None:
        self._id = (~pid << 3) | CPUCLOCK_SCHED

    def seconds(self) -> float:
        """The CPU seconds that the process has used; -1 once it has ended, and on other systems than Linux."""
        if sys.platform != "linux":
            return -1.0
        try:
            return time.clock_gettime(self._id)
        except OSError:
            return -1.0


class Deadline:
    """The end of one judgement: `cpu_s` CPU seconds of the process or `wall_s` seconds on the clock from now.

    The seconds in which the process is stopped for other texts do not count, up to MOST_STOPPED times `wall_s`.
    """

    def __init__(self, clock: Clock, cpu_s: float, wall_s: float) -> None:
        self._clock, self._cpu_s, self._wall_s = clock, cpu_s, wall_s
        self._cpu_at_start = max(0.0, clock.seconds())
        self._started = time.monotonic()
        self._stopped_s, self._stopped_since = 0.0, math.inf

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds that the process has used since it started."""
        return max(0.0, self._clock.seconds() - self._cpu_at_start)

    def stopped(self) -> None:
        """Note that the process is stopped for other texts."""
        self._stopped_since = min(self._stopped_since, time.monotonic())

    def continued(self) -> None:
        """Note that it runs again."""
        self._stopped_s += max(0.0, time.monotonic() - self._stopped_since)
        self._stopped_since = math.inf

    def _clock_seconds(self) -> float:
        now = time.monotonic()
        return now - self._started - self._stopped_s - max(0.0, now - self._stopped_since)

    def look(self, ready: select.poll, pause_s: float) -> bool:
        """Wait until `ready`, at most `pause_s`; whether it is. Raises TimeoutError at the deadline."""
        if ready.poll(max(0.0, min(self._wall_s - self._clock_seconds(), pause_s)) * 1000):
            return True
        if self.cpu_seconds > self._cpu_s:
            raise TimeoutError(f"within {self._cpu_s:g} s of CPU time")
        if self._clock_seconds() >= self._wall_s:
            raise TimeoutError(f"within {self._wall_s:g} s")
        if time.monotonic() - self._started >= MOST_STOPPED * self._wall_s:
            raise TimeoutError(f"within {MOST_STOPPED * self._wall_s:g} s, in which other texts needed the cores")
        return False

    def wait(self, ready: select.poll, slow_s: float | None = None) -> bool:
        """Wait until `ready`; False if that takes long, `slow_s` CPU seconds (None: however long).

        Raises TimeoutError at the deadline.
        """
        pause_s = LOOK_S if slow_s is None else min(LOOK_S, slow_s)
        while not self.look(ready, pause_s):
            if slow_s is None:
                continue
            left_s = slow_s - self.cpu_seconds
            if left_s <= 0 or self._clock_seconds() >= SLOW_WALL_S:
                return False
            pause_s = min(LOOK_S, max(LEAST_LOOK_S, left_s))
        return True


class UsualTime:
    """How long the judgements of one verifier usually take, made of those that have ended: a hang does not count.

    For any thread: a lost update does no harm.
    """

    def __init__(self) -> None:
        self._mean_s, self._count = 0.0, 0

    def add(self, cpu_s: float) -> None:
        """Add a judgement that has ended, by its CPU seconds."""
        self._count = min(REMEMBERED, self._count + 1)
        self._mean_s += (cpu_s - self._mean_s) / self._count

    @property
    def slow_s(self) -> float:
        """The CPU seconds from which a judgement takes long."""
        return min(MOST_SLOW_S, max(LEAST_SLOW_S, SLOW_FACTOR * self._mean_s))
