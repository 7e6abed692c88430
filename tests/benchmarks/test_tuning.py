"""Tuning on the simulated pipeline, against the best static setting of a sweep."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.simulation.tuning.__main__ import ASKED, tuned
from benchmarks.simulation.tuning.pipeline import Pipeline
from benchmarks.simulation.tuning.scenarios import EIGHT, LAPTOP, LEARNER_BOUND, SCENARIOS
from benchmarks.simulation.tuning.sweep import best_static
from services.controller.tuning.knobs import Knob, Values


def test_it_reaches_the_best_static_setting():
    best = best_static(LAPTOP, factors=(1.0, 2.0))
    found = tuned(LAPTOP)
    assert found.tokens_per_s >= ASKED * best.tokens_per_s
    assert found.staleness <= 1.05 * LAPTOP.staleness
    before = Pipeline(LAPTOP, LAPTOP.start).run()
    assert found.tokens_per_s > 1.1 * before.tokens_per_s, "the start is a bad one"


def test_every_value_stays_within_its_bounds():
    scenario = replace(LEARNER_BOUND, steps=60, warm_up=20)
    moves = tuned(scenario).moves
    assert moves
    for _, move in moves:
        assert scenario.bounds[move.knob].within(move.after) == move.after
    steps = [step for step, _ in moves]
    assert min(later - earlier for earlier, later in pairwise(steps)) >= scenario.rules.cool_down


def test_the_pipeline_obeys_the_staleness_bound():
    scenario = replace(EIGHT, steps=30, warm_up=10)
    pipeline = Pipeline(scenario, Values(max_inflight_groups=96, max_staleness=2, replicas=4))
    pipeline.run()
    assert max(signals.staleness for signals in pipeline.log) <= 2
    assert max(signals.in_flight for signals in pipeline.log) <= 96
    slow = Pipeline(scenario, Values(max_inflight_groups=96, max_staleness=2, replicas=1)).run()
    assert slow.idle > pipeline.score().idle + 0.1, "fewer replicas let the learner wait"


def test_a_learner_bound_run_gives_replicas_back():
    found = tuned(LEARNER_BOUND)
    assert found.values.replicas < LEARNER_BOUND.start.replicas
    assert found.staleness <= 1.05 * LEARNER_BOUND.staleness
    assert LEARNER_BOUND.bounds[Knob.REPLICAS].within(found.values.replicas) == found.values.replicas


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS[1:], ids=lambda scenario: scenario.name)
def test_it_reaches_the_best_of_each_large_sweep(scenario):
    best = best_static(scenario, factors=(1.0, 2.0))
    for seed in (0, 1):
        assert tuned(scenario, seed).tokens_per_s >= ASKED * best.tokens_per_s
