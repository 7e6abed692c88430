"""Owns what is simulated: the replicas, the lengths, the prompts, the learner that fits a fleet, and the bound.

Must not simulate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.pipeline import Plan
from benchmarks.simulation.replica import Engine
from benchmarks.simulation.replicas import Failures
from benchmarks.studies.selection.closed_forms import cost_over
from benchmarks.studies.selection.prompts import POPULATIONS, Way
from services.sampler.queue.state import NO_ESCALATION
from services.sampler.selection.posterior import mixed
from services.settings import StarvationSettings

ENGINE = Engine(peak=4368, half=48, max_sequences=64, start_s=180, pause_s=1)
"""39 tokens/s per sequence with 64 of them, 2,496 together; 89 alone."""
LENGTHS = Lengths(median=2500, spread=0.8, longest=20480)
FAILURES = Failures(mtbf_s=8 * 3600, lease_s=30)
GROUP, PER_REPLICA = 16, 4
"""Samples per group; groups that the sequences of a replica hold, whole ones."""
PROMPTS_PER_GROUP = 32
"""Prompts, per group of a batch: 16,384 with 512."""
VERDICT_S, STEP_S = 1.0, 2.0
WEIGHTS, LINK, SETTLE_S, MEMBER_S = 15.2e9, 25e9, 0.2, 0.0005
"""Bytes of a weight sync, bytes/s of the learner's link; seconds of its two looks, and per member."""
LEARNER = 1.15
"""The learner trains so many times as fast as the fleet can generate at most."""
LEARNER_GPUS = 0.25
"""The learner's GPUs per replica of one GPU."""


def weak(replicas: int, groups: int) -> int:
    """The batch of a fleet: `groups`, or PER_REPLICA for each replica if that is more."""
    return max(groups, PER_REPLICA * replicas)


def publish_s(replicas: int) -> float:
    """Seconds of a weight sync: each byte leaves the learner once, and is passed on from replica to replica."""
    return WEIGHTS / LINK + SETTLE_S + MEMBER_S * replicas


UNIFORM = Way("uniform")


@dataclass(frozen=True)
class Setup:
    """One fleet, and how it is used. `batch`: groups per rollout step."""

    replicas: int
    batch: int
    way: Way = UNIFORM
    population: str = "U-shaped"
    max_staleness: int = 8
    refill: str = "continuous"
    batch_factor: int = 1
    failures: Failures = FAILURES
    engine: Engine = ENGINE
    lengths: Lengths = LENGTHS
    seed: int = 0

    @property
    def prompts(self) -> int:
        """How many there are."""
        return PROMPTS_PER_GROUP * self.batch

    @property
    def fleet_tokens(self) -> float:
        """Tokens per second of the whole fleet, all of it always full."""
        return self.replicas * self.engine.fastest

    @cached_property
    def samples_per_group(self) -> float:
        """Samples that have to be drawn per kept group.

        `boundary` is held to prompts that all have the pass rate 1/2, where the share of groups that are kept is
        highest, 1 - 2^(1-G). The other ways draw uniformly from the population.
        """
        if self.way.strategy == "boundary":
            return GROUP / mixed(0.5, GROUP)
        rates = POPULATIONS[self.population](np.random.default_rng(self.seed), self.prompts).tolist()
        screened = self.way.screen_samples if self.way.screens else GROUP
        return cost_over(rates, [1.0] * len(rates), GROUP, screened)

    @property
    def fleet_bound(self) -> float:
        """Groups per second that the fleet can supply at most."""
        return self.fleet_tokens / (self.samples_per_group * self.lengths.mean)

    @property
    def learner_tokens(self) -> float:
        """Tokens per second of a learner that fits the fleet, besides its fixed times.

        Raises ValueError if the fleet fills a batch faster than the fixed times of a rollout step.
        """
        seconds = self.batch / (LEARNER * self.fleet_bound) - STEP_S - publish_s(self.replicas)
        if seconds <= 0:
            raise ValueError(f"batch: {self.batch} is not valid for {self.replicas} replicas: expected a larger one")
        return self.batch * GROUP * self.lengths.mean / seconds

    @property
    def step_s(self) -> float:
        """Seconds of a rollout step at the bound."""
        return self.batch / self.bound

    @property
    def bound(self) -> float:
        """Groups trained per second at most: the lower one of what the fleet supplies and what the learner trains."""
        seconds = STEP_S + self.batch * GROUP * self.lengths.mean / self.learner_tokens + publish_s(self.replicas)
        return min(self.fleet_bound, self.batch / seconds)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest response in a full replica."""
        return self.lengths.longest / self.engine.per_sequence

    @property
    def warm_up(self) -> int:
        """Rollout steps until every response that began with the first ones has ended."""
        return math.ceil(self.longest_s / self.step_s) + 5 if self.max_staleness else 2

    def plan(self, steps: int) -> Plan:
        """The run."""
        return Plan(
            engine=self.engine,
            groups_per_step=self.batch,
            group_size=GROUP,
            step_s=STEP_S,
            learner_tokens=self.learner_tokens,
            publish_s=publish_s(self.replicas),
            steps=steps,
            verdict_s=VERDICT_S,
            failures=self.failures,
            refill=self.refill,
            batch_factor=self.batch_factor,
            starvation=StarvationSettings() if self.refill == "continuous" else NO_ESCALATION,
        )
