"""Owns the list of what is simulated, and in which order.

Must not print, nor judge a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.fleet.result import Result, simulate
from benchmarks.simulation.fleet.setup import PER_REPLICA, Setup, weak
from benchmarks.studies.selection.prompts import POPULATIONS, Way

GROWTH = 6
WAYS = (Way("uniform"), Way("boundary"), Way("screen", 4), Way("screen", 8))
BOUNDS = (1, 2, 4, 6, 8, 12)
SYNCHRONOUS = 256
"""The largest fleet that is simulated synchronously too."""
EPOCHS_WARM_UP = 25
"""Rollout steps before selections are compared: `boundary` knows nothing in the first pass over the prompts."""
FACTORS = (1, 2, 3)
FEWER = 8
"""Batches that are so many times as large as the base's are counted for half as many rollout steps."""


@dataclass
class Study:
    """All results. `base` and the others: one result per seed.

    `scales`: fleets whose batch grows with them. `refilled`: the same, synchronous, with refill; `published`:
    synchronous with generation batches, of the factor that is best at the base. `fixed`: fleets with the base's batch.
    `smaller`: a sixth of the base, with the base's batch; `grown`: six times the base. `bounds`: by max_staleness.
    """

    base: list[Result]
    grown: list[Result]
    smaller: list[Result]
    refilled_base: list[Result]
    published_base: list[Result]
    scales: list[Result]
    refilled: list[Result]
    published: list[Result]
    fixed: list[Result]
    bounds: list[Result]
    ways: list[Result]


def study(scales: Sequence[int], groups: int, steps: int, seeds: int, report: Callable[[str], None]) -> Study:
    """Simulate everything. `groups`: the batch of the base, a fleet that holds one batch of whole groups at a time."""
    base = Setup(max(1, groups // PER_REPLICA), groups)

    def run(setup: Setup, measured: int = steps, warm_up: int = 0) -> Result:
        counted = measured if setup.batch < FEWER * groups else max(1, measured // 2)
        found = simulate(setup, counted, warm_up)
        report(
            f"{setup.replicas:>5} replicas, batch {setup.batch:>5}, {setup.way.title}, {setup.population}, "
            f"max_staleness {setup.max_staleness}, {setup.refill} x {setup.batch_factor}: {found.groups_per_s:.3f} "
            f"groups/s, {found.of_bound:.3f} of the bound"
        )
        return found

    def seeded(setup: Setup) -> list[Result]:
        return [run(replace(setup, seed=seed)) for seed in range(seeds)]

    refill = replace(base, max_staleness=0)
    published = max(
        (run(replace(refill, refill="generation_batches", batch_factor=factor)) for factor in FACTORS),
        key=lambda found: found.groups_per_s,
    ).setup
    fleets = [Setup(replicas, weak(replicas, groups)) for replicas in scales]
    synchronous = [fleet for fleet in fleets if fleet.replicas <= SYNCHRONOUS]
    return Study(
        base=seeded(base),
        grown=seeded(replace(base, replicas=GROWTH * base.replicas, batch=GROWTH * groups)),
        smaller=seeded(replace(base, replicas=max(1, base.replicas // GROWTH))),
        refilled_base=seeded(refill),
        published_base=seeded(published),
        scales=[run(fleet) for fleet in fleets],
        refilled=[run(replace(refill, replicas=fleet.replicas, batch=fleet.batch)) for fleet in synchronous],
        published=[run(replace(published, replicas=fleet.replicas, batch=fleet.batch)) for fleet in synchronous],
        fixed=[run(replace(base, replicas=times * base.replicas)) for times in (1, 2, 4, 8)],
        bounds=[run(replace(base, max_staleness=bound)) for bound in BOUNDS],
        ways=[
            run(replace(base, population=population, way=way), steps, EPOCHS_WARM_UP)
            for population in POPULATIONS
            for way in WAYS
        ],
    )
