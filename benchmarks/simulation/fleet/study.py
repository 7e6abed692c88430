"""Owns the list of what is simulated, and in which order.

Must not print, nor judge a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TypeAlias

from benchmarks.simulation.fleet.result import Result, simulate
from benchmarks.simulation.fleet.setup import PER_REPLICA, Setup, weak
from benchmarks.studies.selection.prompts import POPULATIONS, Way

GROWTH = 6
WAYS = (Way("uniform"), Way("boundary"), Way("screen", 4), Way("screen", 8))
BOUNDS = (1, 2, 4, 6, 8, 12)
SYNCHRONOUS = 256
"""The largest fleet that is simulated synchronously too."""
EPOCHS = 40
"""Rollout steps before selections are compared: `boundary` knows nothing in the first pass over the prompts."""
PART = 4
"""Selections are compared with a fleet and a batch of this part of the base, so that it has several passes."""
FACTORS = (1, 2, 3)


@dataclass
class Study:
    """All results. `base`, `grown`, `smaller`, and `..._base`: one result per seed.

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


def counted(setup: Setup, groups: int, steps: int) -> int:
    """Rollout steps that are counted: `steps`, fewer for batches that are more than four times `groups`."""
    return max(2, min(steps, 4 * groups * steps // setup.batch))


def listed(scales: Sequence[int], groups: int, seeds: int, published: Setup) -> dict[str, list[Setup]]:
    """Every fleet by the field of `Study`. `published`: the base, synchronous with generation batches."""
    base = replace(published, max_staleness=Setup.max_staleness, refill=Setup.refill, batch_factor=1)
    fleets = [Setup(replicas, weak(replicas, groups)) for replicas in scales]
    together = [fleet for fleet in fleets if fleet.replicas <= SYNCHRONOUS]
    part = replace(base, replicas=max(1, base.replicas // PART), batch=max(1, groups // PART))
    seeded = {
        "base": base,
        "grown": replace(base, replicas=GROWTH * base.replicas, batch=GROWTH * groups),
        "smaller": replace(base, replicas=max(1, base.replicas // GROWTH)),
        "refilled_base": replace(base, max_staleness=0),
        "published_base": published,
    }
    return {name: [replace(setup, seed=seed) for seed in range(seeds)] for name, setup in seeded.items()} | {
        "scales": fleets,
        "refilled": [replace(fleet, max_staleness=0) for fleet in together],
        "published": [replace(published, replicas=fleet.replicas, batch=fleet.batch) for fleet in together],
        "fixed": [replace(base, replicas=times * base.replicas) for times in (1, 2, 4, 8)],
        "bounds": [replace(base, max_staleness=bound) for bound in BOUNDS],
        "ways": [replace(part, population=population, way=way) for population in POPULATIONS for way in WAYS],
    }


Job: TypeAlias = tuple[Setup, int, int]
"""A fleet, the rollout steps that are counted, and the fewest before them."""


def study(
    scales: Sequence[int], groups: int, steps: int, seeds: int, jobs: int, report: Callable[[str], None]
) -> Study:
    """Simulate everything, `jobs` fleets at the same time.

    `groups`: the batch of the base, a fleet that holds one batch of whole groups at a time.
    """
    base = Setup(max(1, groups // PER_REPLICA), groups, max_staleness=0, refill="generation_batches")
    tries = [(replace(base, batch_factor=factor), steps, 0) for factor in FACTORS]
    published = max(_results(tries, jobs, report), key=lambda found: found.groups_per_s).setup
    fleets = listed(scales, groups, seeds, published)
    todo: dict[Setup, Job] = {}
    for name, setups in fleets.items():
        selects = name == "ways"
        for setup in setups:
            todo[setup] = (setup, 2 * steps if selects else counted(setup, groups, steps), EPOCHS if selects else 0)
    # The largest first, so that none is left for the end.
    ordered = sorted(todo.values(), key=lambda job: -job[0].batch)
    results = {found.setup: found for found in _results(ordered, jobs, report)}
    return Study(**{name: [results[setup] for setup in setups] for name, setups in fleets.items()})


def _results(todo: Sequence[Job], jobs: int, report: Callable[[str], None]) -> list[Result]:
    if jobs == 1:
        return [_reported(_simulated(job), report) for job in todo]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return [_reported(found, report) for found in pool.map(_simulated, todo)]


def _simulated(job: Job) -> Result:
    setup, steps, warm_up = job
    return simulate(setup, steps, warm_up)


def _reported(found: Result, report: Callable[[str], None]) -> Result:
    setup = found.setup
    report(
        f"{setup.replicas:>5} replicas, batch {setup.batch:>5}, {setup.way.title}, {setup.population}, "
        f"max_staleness {setup.max_staleness}, {setup.refill}, seed {setup.seed}: {found.groups_per_s:.3f} groups/s, "
        f"{found.of_bound:.3f} of the bound"
    )
    return found
