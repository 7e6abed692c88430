"""Owns the sweep: every static setting of a grid within a scenario's bounds, and the best of them.

Must not tune anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.simulation.tuning.pipeline import Pipeline, Score
from benchmarks.simulation.tuning.scenarios import Scenario
from services.controller.tuning.knobs import Knob, Values

FACTORS = (1.0, 1.4, 2.0, 3.0)
"""Limits of groups in flight, as factors of the smallest valid one; beyond the largest the slots limit them anyway."""
REPLICAS = 5
"""How many numbers of replicas, evenly over the bounds."""


def grid(scenario: Scenario, factors: tuple[float, ...] = FACTORS) -> Iterator[Values]:
    """The static settings of a scenario."""
    bounds, rules = scenario.bounds, scenario.rules
    replicas = [scenario.start.replicas]
    if between := bounds.get(Knob.REPLICAS):
        width = between.most - between.least
        replicas = sorted({between.least + width * part // (REPLICAS - 1) for part in range(REPLICAS)})
    for bound in range(bounds[Knob.STALENESS].least, bounds[Knob.STALENESS].most + 1):
        limits = {round(rules.least_inflight(bound) * factor) for factor in factors}
        for limit in sorted(limits):
            if bounds[Knob.INFLIGHT].within(limit) == limit:
                yield from (Values(limit, bound, count) for count in replicas)


def best_static(scenario: Scenario, factors: tuple[float, ...] = FACTORS, seed: int = 0) -> Score:
    """The static setting that trains most tokens per second, of those whose mean staleness is at most the target."""
    scores = (Pipeline(scenario, values, seed=seed).run() for values in grid(scenario, factors))
    return max(
        (score for score in scores if score.staleness <= scenario.staleness), key=lambda score: score.tokens_per_s
    )
