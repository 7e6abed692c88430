"""Owns the cost of a sampler that has nothing to do, by the number of groups that are pending meanwhile.

Must not look inside the sampler: a turn is one read of the verdicts, which the server counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_plane.bench import Bench

SAMPLES = 2
HELPERS = ("learner", "rollout", "verifier")
FRESH_S, SEARCHING_S = 3.0, 33.0
"""When the two windows begin: after the last verdict; and once the sampler also searches for orphaned groups."""


@dataclass(frozen=True)
class Turn:
    """CPU milliseconds of one turn, in the sampler and in the server; and both as a share of a core."""

    sampler_ms: float
    server_ms: float
    share: float


def measure(folder: Path, pending: int, window_s: float, fsync: str = "always") -> tuple[Turn, Turn]:
    """An idle turn with `pending` groups, half of them kept: soon after the last verdict, and half a minute later."""
    groups = max(pending, 1)
    limits = {"groups_per_step": groups, "max_inflight_groups": groups, "max_staleness": 0, "rollout_steps": 4}
    with Bench(folder, f"idle-{pending}", groups + 64, fsync, group_size=SAMPLES, **limits) as bench:
        if not pending:  # a paused run dispatches nothing
            bench.redis.hset(bench.key("record"), "pause_requested", "1")
        bench.start("sampler")
        bench.until(lambda: bench.redis.exists(bench.key("verdicts")) == 1, "the sampler's first turn")
        bench.until(lambda: bench.counter("dispatched") >= pending, f"{pending} groups dispatched")
        if pending:
            _judge(bench, pending // 2)
        begun = time.perf_counter()
        windows = []
        for starts in (FRESH_S, SEARCHING_S):
            time.sleep(max(0.0, begun + starts - time.perf_counter()))
            windows.append(_window(bench, window_s))
    return windows[0], windows[1]


def _judge(bench: Bench, groups: int) -> None:
    """Have at least `groups` groups judged, all of which are kept, and end everything but the sampler."""
    for service in HELPERS:
        bench.start(service)
    bench.until(lambda: bench.counter("judged") >= groups, f"{groups} groups judged")
    for service in HELPERS:
        bench.kill(service)
    bench.until(lambda: bench.acked("verdicts") == bench.entries("verdicts"), "all verdicts recorded")


def _window(bench: Bench, window_s: float) -> Turn:
    turns, before, started = _reads(bench), bench.cpu_s(), time.perf_counter()
    time.sleep(window_s)
    after, lasted = bench.cpu_s(), time.perf_counter() - started
    count = _reads(bench) - turns
    spent = {name: after[name] - before[name] for name in before}
    return Turn(
        1000 * spent["sampler"] / count,
        1000 * spent["valkey"] / count,
        (spent["sampler"] + spent["valkey"]) / lasted,
    )


def _reads(bench: Bench) -> int:
    """How often a consumer group was read; only the sampler reads any."""
    return int(bench.redis.info("commandstats").get("cmdstat_xreadgroup", {"calls": 0})["calls"])
