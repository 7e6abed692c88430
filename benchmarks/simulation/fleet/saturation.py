"""Owns at how many replicas each part that does not grow with the fleet is saturated, from measured costs.

Must not measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.simulation.fleet.costs import Costs
from benchmarks.simulation.fleet.result import Result
from benchmarks.simulation.fleet.setup import LINK, MEMBER_S, publish_s
from learner.weight_sync.publisher import POLL_S
from rollout.half_drawn import KEEP_EVERY_S

NETWORK = 1.25e9
"""Bytes/s of Redis' link each way: 10 Gbit/s."""
SYNC_SHARE = 0.1
"""Of a rollout step; the learner waits for its weight sync."""


@dataclass(frozen=True)
class Part:
    """One part: what each replica costs it per second, as a share of all that it has, and what to do beyond."""

    name: str
    per_replica: float
    then: str

    @property
    def replicas(self) -> float:
        """How many replicas saturate it."""
        return 1 / self.per_replica if self.per_replica else math.inf


def parts(found: Result, costs: Costs) -> list[Part]:
    """Every part, the one that is saturated first before the others. `found`: a fleet that is well used."""
    groups, calls = found.judged_per_s / found.setup.replicas, found.open_groups / KEEP_EVERY_S
    looks = 1 / POLL_S
    calls_s = calls * costs.keep_s
    redis_s = groups * costs.redis_s + calls_s + looks * costs.look_redis_s
    received = groups * costs.redis_in + calls * costs.keep_in
    sent = groups * costs.redis_out + looks * costs.look_out
    room = SYNC_SHARE * found.setup.step_s - publish_s(0)
    listed = [
        Part(
            "Redis, one core",
            redis_s,
            f"{calls_s / redis_s:.0%} of it keeps half-drawn responses: keep them less often; then one Redis per run",
        ),
        Part("Redis, 10 Gbit/s in", received / NETWORK, "a faster link; half-drawn responses less often"),
        Part("Redis, 10 Gbit/s out", sent / NETWORK, "a faster link"),
        Part("sampler, one core", groups * costs.sampler_s, "split the fleet into runs: a run has one sampler"),
        Part("learner's looks at heartbeats, one core", looks * costs.look_s, "look less often than every 0.1 s"),
        Part(
            f"weight sync, {SYNC_SHARE:.0%} of a step",
            MEMBER_S / room if room > 0 else math.inf,
            f"larger batches, or a link above {LINK / 1e9:.0f} GB/s",
        ),
        Part(
            "staleness, batch as it is",
            staleness_share(found) / found.setup.replicas,
            "a batch that grows with the fleet, a larger max_staleness, or fewer sequences per replica",
        ),
    ]
    return sorted(listed, key=lambda part: part.replicas)


def staleness_share(found: Result) -> float:
    """The longest response's rollout steps, with one to wait and one to train, of those that max_staleness allows."""
    steps = found.setup.longest_s / found.setup.step_s + 2
    return steps / (found.setup.max_staleness + 1)
