"""Owns the four stages of a group measured one after the other: each service alone works off a backlog of one run.

Must not run two services of a stage at once, except the learner's stub, which waits for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.data_plane.bench import Bench
from benchmarks.data_plane.latency import delayed
from benchmarks.data_plane.reference import Messages, Pace, capture

SAMPLES = 16
STUB_VERIFIER = "tests.harness.stubs.verifier"
FIRST, LAST = 0.05, 0.95
"""The part of a backlog over which its rate is measured: without the start and the end of a service."""


@dataclass
class Stages:
    """Each stage's pace and number of messages. `messages`: what they carried."""

    paces: dict[str, Pace] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    messages: Messages | None = None


def pace_of(bench: Bench, done: Callable[[], int], total: int, what: str) -> Pace:
    """How fast `done` grows from FIRST to LAST of `total`, and the CPU time that each costs.

    From the last look below FIRST: a stage that is done between two looks gets a lower bound.
    """
    looks: list[tuple[float, int, float]] = []

    def look() -> bool:
        count = done()
        if count < FIRST * total:
            looks.clear()
        looks.append((time.perf_counter(), count, sum(bench.cpu_s(children=False).values())))
        return count >= LAST * total

    bench.until(look, f"{what}: {total}")
    bench.until(lambda: done() >= total, f"{what}: {total}")
    (begun, low, idle_s), (ended, high, busy_s) = looks[0], looks[-1]
    return Pace((high - low) / (ended - begun), (busy_s - idle_s) / (high - low))


def measure(folder: Path, name: str, groups: int, latency_ms: float = 0.0, fsync: str = "always") -> Stages:
    """Dispatch `groups` groups of SAMPLES samples, generate, judge and record them, stage by stage."""
    limits = {"groups_per_step": groups, "max_inflight_groups": groups, "max_staleness": 0, "rollout_steps": 4}
    with Bench(folder, name, groups + 64, fsync, **limits) as bench:
        if not latency_ms:
            return _stages(bench, bench.url, groups)
        with delayed(bench.port, latency_ms) as url:
            return _stages(bench, url, groups)


def _stages(bench: Bench, url: str, groups: int) -> Stages:
    stages, samples = Stages(), groups * SAMPLES
    stages.counts = {"dispatched": groups, "generated": samples, "judged": samples, "recorded": samples}
    bench.start("sampler", url=url)
    stages.paces["dispatched"] = pace_of(bench, lambda: bench.counter("dispatched"), groups, "groups dispatched")
    bench.kill("sampler")
    bench.start("learner")
    bench.until(lambda: bool(bench.redis.exists(bench.key("policy"))), "the first policy version")
    bench.start("rollout", url=url)
    stages.paces["generated"] = pace_of(bench, lambda: bench.entries("samples"), samples, "samples generated")
    bench.kill("rollout")
    bench.start("verifier", url=url, program=STUB_VERIFIER)
    stages.paces["judged"] = pace_of(bench, lambda: bench.entries("verdicts"), samples, "verdicts given")
    bench.kill("verifier")
    stages.messages = capture(bench)
    bench.start("sampler", url=url)
    stages.paces["recorded"] = pace_of(bench, lambda: bench.acked("verdicts"), samples, "verdicts recorded")
    return stages
