"""Owns the CPU time of a group: all services of a run at work at the same time, for a while.

Must not count the start of a process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_plane.bench import Bench

LIMITS = {"groups_per_step": 32, "max_inflight_groups": 128, "max_staleness": 1, "rollout_steps": 100_000}
FILTERED = 0.25
QUESTIONS = 2048
WARM_GROUPS = 200
SERVICES = ("learner", "sampler", "verifier", "rollout")


@dataclass(frozen=True)
class Cost:
    """CPU seconds per judged group by process, and judged groups per second.

    `redis_in` and `redis_out`: bytes that enter and leave the server per judged group.
    """

    cpu_s: dict[str, float]
    groups_per_s: float
    redis_in: float
    redis_out: float

    @property
    def total_s(self) -> float:
        """CPU seconds per group over all processes."""
        return sum(self.cpu_s.values())


def measure(
    folder: Path, seconds: float, fsync: str = "always", rollout: Sequence[str] = (), filtered: float = FILTERED
) -> Cost:
    """The cost of a group of 16 small samples once the run is warm, over `seconds` seconds.

    `rollout`: more arguments of the stub of a replica, see tests/harness/stubs/engine.py; `filtered`: share of groups.
    """
    with Bench(folder, "steady", QUESTIONS, fsync, **LIMITS) as bench:
        for service in SERVICES:
            arguments = ("--filtered", str(filtered), *rollout) if service == "rollout" else ()
            bench.start(service, *arguments)
        bench.until(lambda: bench.counter("judged") >= WARM_GROUPS, f"{WARM_GROUPS} judged groups")
        before, groups, started = bench.cpu_s(), bench.counter("judged"), time.perf_counter()
        traffic = bench.traffic()
        time.sleep(seconds)
        after, judged, lasted = bench.cpu_s(), bench.counter("judged") - groups, time.perf_counter() - started
        received, sent = (now - then for now, then in zip(bench.traffic(), traffic, strict=True))
        bench.until(lambda: True, "every service to be alive")
    spent = {name: (after[name] - before[name]) / judged for name in before}
    return Cost(spent, judged / lasted, received / judged, sent / judged)
