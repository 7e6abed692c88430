"""Owns the time of a judgement: CPU seconds of the judging process, and a larger bound on the clock.

Must not kill anything.

On a busy machine a judgement takes long on the clock, and is not wrong or late for it. The clock ends what sleeps.
"""

from __future__ import annotations

import select
import sys
import time

LOOK_S, FIRST_LOOK_S = 0.05, 0.045
"""The pause between two looks at the CPU time of a process that has not answered."""
SLOW_CPU_S, SLOW_WALL_S = 0.04, 0.25
"""A judgement takes long from so many CPU seconds, or so many on the clock."""
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
    """The end of one judgement: `cpu_s` CPU seconds of the process or `wall_s` seconds on the clock from now."""

    def __init__(self, clock: Clock, cpu_s: float, wall_s: float) -> None:
        self._clock, self._cpu_s, self._wall_s = clock, cpu_s, wall_s
        self._cpu_at_start = max(0.0, clock.seconds())
        self._started = time.monotonic()

    def wait(self, ready: select.poll, *, even_if_slow: bool) -> bool:
        """Wait until `ready`; False if the judgement takes long, unless `even_if_slow`.

        Raises TimeoutError at the deadline.
        """
        while True:
            left = self._started + self._wall_s - time.monotonic()
            if ready.poll(max(0.0, min(left, LOOK_S if even_if_slow else FIRST_LOOK_S)) * 1000):
                return True
            cpu, wall = self._clock.seconds() - self._cpu_at_start, time.monotonic() - self._started
            if cpu > self._cpu_s:
                raise TimeoutError(f"within {self._cpu_s:g} s of CPU time")
            if wall >= self._wall_s:
                raise TimeoutError(f"within {self._wall_s:g} s")
            if not even_if_slow and (cpu >= SLOW_CPU_S or wall >= SLOW_WALL_S):
                return False
