"""Owns one simulated fleet's figures, after its warm-up.

Must not print.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import fmean

from benchmarks.simulation.fleet.setup import GROUP, LEARNER_GPUS, Setup
from benchmarks.simulation.fleet.tasks import FleetTasks
from benchmarks.simulation.pipeline import Pipeline
from benchmarks.studies.selection.prompts import KnownPrompts

IN_FLIGHT = 4
"""limits.max_inflight_groups, in batches for each of max_staleness + 1: more than the slots need, unless starved."""


@dataclass(frozen=True)
class Result:
    """A fleet. Shares are of 1; `used`: tokens drawn of those that a full fleet would have drawn.

    `idle`: the learner's share of the time without a batch. `filtered`, `stale`, `lost`: tokens, of those drawn.
    `kept`: groups, of those judged; `signal`: the mean of 1 - p^G - (1-p)^G over the prompts of the judged groups.
    `gpu_s`: GPU-seconds per trained group. `open_groups`: groups per replica with a response in progress, at the end.
    """

    setup: Setup
    groups_per_s: float
    judged_per_s: float
    used: float
    idle: float
    staleness: float
    stalest: int
    filtered: float
    stale: float
    lost: float
    kept: float
    signal: float
    stale_groups: float
    gpu_s: float
    open_groups: float

    @property
    def of_bound(self) -> float:
        """Its share of the analytic bound."""
        return self.groups_per_s / self.setup.bound


def pipeline(setup: Setup, steps: int) -> tuple[Pipeline, FleetTasks]:
    """The run, not started, and its groups."""
    prompts = KnownPrompts(setup.population, setup.way, setup.prompts, GROUP, setup.seed)
    tasks = FleetTasks(prompts, setup.lengths, setup.seed)
    limit = IN_FLIGHT * setup.batch * (setup.max_staleness + 1)
    return Pipeline(setup.plan(steps), tasks, setup.replicas, limit, setup.max_staleness, setup.seed), tasks


def simulate(setup: Setup, measured: int, warm_up: int = 0) -> Result:
    """Simulate the warm-up, at least `warm_up` rollout steps, and then so many `measured` ones."""
    warm_up = max(warm_up, setup.warm_up)
    run, tasks = pipeline(setup, warm_up + measured)
    gc.disable()  # nothing here is garbage in cycles, and looking for it takes a third of the time
    try:
        log = run.run()
    finally:
        gc.enable()
    before, last, found = log[warm_up - 1], log[-1], log[warm_up:]
    seconds, tokens = last.at - before.at, last.ledger - before.ledger
    groups = sum(step.groups for step in found)
    kept, filtered = sum(step.kept for step in found), sum(step.filtered for step in found)
    stale = sum(step.stale for step in found)
    replica_s = last.replica_s - before.replica_s
    return Result(
        setup=setup,
        groups_per_s=groups / seconds,
        judged_per_s=(kept + filtered) / seconds,
        used=tokens.drawn / (setup.fleet_tokens * seconds),
        idle=sum(step.waited_s for step in found) / seconds,
        staleness=fmean(step.staleness for step in found),
        stalest=max(step.stalest for step in found),
        filtered=tokens.filtered / tokens.drawn,
        stale=tokens.stale / tokens.drawn,
        lost=tokens.lost / tokens.drawn,
        kept=kept / (kept + filtered),
        signal=tasks.signal / tasks.decided,
        stale_groups=stale / max(1, stale + groups),
        gpu_s=(replica_s + LEARNER_GPUS * setup.replicas * seconds) / groups,
        open_groups=run.fleet.open_groups / setup.replicas,
    )
