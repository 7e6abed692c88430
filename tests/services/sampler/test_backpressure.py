"""Back-pressure by slots: tables of cases, and the properties of every refill rule for any flow."""

import heapq
import math
import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.backpressure import (
    REFILLS,
    Flow,
    SlotLimits,
    SurvivalEstimate,
    continuous,
    generation_batch,
    staleness,
)
from services.settings.algorithm.sampling import DynamicSamplingSettings


def limits_of(groups_per_step=8, max_staleness=1, steps_left=12, max_inflight=64, size=24, widened=False):
    return SlotLimits(groups_per_step, max_staleness, steps_left, max_inflight, size, widened)


def test_every_refill_of_the_settings_has_its_rule():
    assert set(REFILLS) == set(get_args(DynamicSamplingSettings.model_fields["refill"].annotation))


@pytest.mark.parametrize(
    ("max_staleness", "steps_left", "expected"), [(0, 12, 8), (1, 12, 16), (1, 1, 8), (3, 12, 32), (1, 0, 0)]
)
def test_slots(max_staleness, steps_left, expected):
    assert limits_of(max_staleness=max_staleness, steps_left=steps_left).slots == expected


@pytest.mark.conformance(formula="sample until the buffer holds N (DAPO Algorithm 1)", setting="refill = continuous")
@pytest.mark.parametrize(
    ("flow", "max_inflight", "expected"),
    [
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 64, 16),
        (Flow(generating=0, kept=0, batched=0, survival=0.5), 64, 32),
        (Flow(generating=0, kept=0, batched=0, survival=0.5), 24, 24),
        (Flow(generating=16, kept=0, batched=0, survival=0.5), 64, 16),
        (Flow(generating=0, kept=8, batched=8, survival=0.5), 64, 0),
        (Flow(generating=4, kept=8, batched=2, survival=0.5), 64, 8),
        (Flow(generating=20, kept=0, batched=0, survival=1.0), 64, 0),
        (Flow(generating=0, kept=0, batched=0, survival=0.0), 64, 64),
    ],
)
def test_continuous(flow, max_inflight, expected):
    assert continuous(flow, limits_of(max_inflight=max_inflight)) == expected


@pytest.mark.parametrize(
    ("flow", "expected"),
    [
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 24),  # all survive: no surplus
        (Flow(generating=0, kept=0, batched=0, survival=0.5), 34),  # (24 - 2 x sqrt(24 x 0.5)) / 0.5
        (Flow(generating=0, kept=8, batched=8, survival=0.5), 8),  # (8 - 2 x sqrt(8 x 0.5)) / 0.5
        (Flow(generating=1, kept=14, batched=8, survival=0.5), 0),  # 2 - 2 x sqrt(2 x 0.5)
        (Flow(generating=0, kept=14, batched=8, survival=0.5), 1),  # the last slots, one group at a time
        (Flow(generating=0, kept=0, batched=8, survival=0.5), 20),  # 16 - 2 x sqrt(16 x 0.5), above the 8 of a batch
        (Flow(generating=0, kept=7, batched=8, survival=0.1), 33),  # 9 - 2 x sqrt(9 x 0.9), above the 1 of a batch
        (Flow(generating=0, kept=3, batched=8, survival=0.1), 61),  # 13 - 2 x sqrt(13 x 0.9), above 5
        (Flow(generating=2, kept=5, batched=16, survival=0.1), 0),  # two whole batches wait for the learner
        (Flow(generating=0, kept=0, batched=8, survival=0.05), 164),  # 16 - 2 x sqrt(16 x 0.95)
    ],
)
def test_slots_beyond_two_batches_are_filled_with_care(flow, expected):
    assert continuous(flow, limits_of(max_staleness=2, max_inflight=400)) == expected


def run_ahead(survival, bound, groups, capacity, steps):
    """A fleet that is a fifth faster than the learner: stale groups of the kept ones, and the learner's idle share.

    `capacity` groups are generated at a time; a batch is trained in one unit of time.
    """
    draw, seconds = random.Random(1), capacity * survival / (groups * 1.2)
    now, idle, free_since, ends, committed, batched, waiting = 0.0, 0.0, 0.0, math.inf, 0, 0, 0
    kept, running, stale = [], [], 0
    while committed < steps:
        while True:  # batches are published ahead, as by queue.publication
            fresh = [step for step in kept if staleness(committed + batched // groups, step) <= bound]
            stale, kept = stale + len(kept) - len(fresh), fresh
            if len(kept) < groups or batched // groups > bound:
                break
            kept, batched = sorted(kept)[groups:], batched + groups
        if batched and math.isinf(ends):
            idle, ends = idle + now - free_since, now + 1.0
        flow = Flow(waiting + len(running), len(kept), batched, survival)
        waiting += continuous(flow, limits_of(groups, bound, steps, 10_000))
        while waiting and len(running) < capacity:
            waiting -= 1
            heapq.heappush(running, (now + seconds * draw.uniform(0.7, 1.3), committed))
        now = min(ends, running[0][0] if running else math.inf)
        if now == ends:
            ends, batched, committed, free_since = math.inf, batched - groups, committed + 1, now
        elif draw.random() < survival:
            kept.append(heapq.heappop(running)[1])
        else:
            heapq.heappop(running)
    return stale / (stale + steps * groups), idle / now


@pytest.mark.parametrize("survival", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("groups", "capacity"), [(8, 8), (64, 40)])
def test_few_groups_become_stale_and_the_learner_does_not_wait(survival, groups, capacity):
    for bound in (2, 4):
        stale, idle = run_ahead(survival, bound, groups, capacity, steps=150)
        assert stale <= 0.01
        assert idle <= 0.03


@pytest.mark.parametrize(
    ("flow", "steps_left", "expected"),
    [
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 12, 64),
        (
            Flow(generating=20, kept=3, batched=8, survival=1.0),
            12,
            33,
        ),  # enough are in flight; dispatches more all the same
        (Flow(generating=60, kept=3, batched=8, survival=0.1), 12, 0),  # max_inflight is the limit
        (Flow(generating=0, kept=8, batched=8, survival=0.1), 12, 0),  # every slot holds a kept group
        (Flow(generating=0, kept=7, batched=8, survival=0.1), 12, 49),
        (Flow(generating=0, kept=7, batched=0, survival=0.1), 1, 57),
        (Flow(generating=0, kept=0, batched=0, survival=0.1), 0, 0),  # the last batch is published
    ],
)
def test_continuous_widened(flow, steps_left, expected):
    assert continuous(flow, limits_of(steps_left=steps_left, widened=True)) == expected


@pytest.mark.conformance(
    formula="k x N groups at once, then all are judged (code)", setting="refill = generation_batches"
)
@pytest.mark.parametrize(
    ("flow", "max_staleness", "steps_left", "expected"),
    [
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 0, 12, 24),
        (Flow(generating=0, kept=0, batched=0, survival=0.1), 0, 12, 24),  # the survival rate is ignored
        (
            Flow(generating=1, kept=0, batched=0, survival=1.0),
            0,
            12,
            0,
        ),  # one group of the last generation batch is still in flight
        (
            Flow(generating=0, kept=7, batched=0, survival=1.0),
            0,
            12,
            24,
        ),  # one group too few: a whole generation batch more
        (Flow(generating=0, kept=8, batched=0, survival=1.0), 0, 12, 0),  # a batch is complete
        (
            Flow(generating=0, kept=3, batched=8, survival=1.0),
            0,
            12,
            0,
        ),  # on-policy: the learner's batch takes all slots
        (Flow(generating=0, kept=3, batched=8, survival=1.0), 1, 12, 24),
        (Flow(generating=0, kept=3, batched=8, survival=1.0), 1, 1, 0),  # the last batch is published
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 0, 0, 0),
    ],
)
def test_generation_batch(flow, max_staleness, steps_left, expected):
    for widened in (False, True):
        assert generation_batch(flow, limits_of(8, max_staleness, steps_left, widened=widened)) == expected


@pytest.mark.parametrize(
    ("generating", "kept", "undispatched", "expected"),
    [
        (5, 0, 19, 19),  # the rest does not wait for the groups before it
        (0, 7, 19, 19),
        (5, 8, 19, 0),  # a batch is complete without the rest
        (58, 0, 19, 6),  # max_inflight is the limit
    ],
)
def test_the_rest_of_a_generation_batch(generating, kept, undispatched, expected):
    limits = replace(limits_of(), undispatched=undispatched)
    assert generation_batch(Flow(generating, kept, batched=0, survival=1.0), limits) == expected


COUNTS = st.integers(0, 80)
FLOWS = st.builds(Flow, generating=COUNTS, kept=COUNTS, batched=COUNTS, survival=st.floats(0, 1))


@given(
    flow=FLOWS,
    groups=st.integers(1, 16),
    max_staleness=st.integers(0, 3),
    steps_left=st.integers(0, 5),
    factor=st.integers(1, 4),
    spare=st.integers(0, 40),
    widened=st.booleans(),
)
@pytest.mark.parametrize("refill", REFILLS)
def test_no_refill_exceeds_max_inflight_or_starves(
    refill, flow, groups, max_staleness, steps_left, factor, spare, widened
):
    limit = groups * (factor + max_staleness + 1) + spare  # what a recipe must allow
    limits = limits_of(groups, max_staleness, steps_left, limit, groups * factor, widened)
    count = REFILLS[refill](flow, limits)
    assert count >= REFILLS[refill](flow, replace(limits, widened=False)), "a widened run dispatches fewer groups"
    in_flight = flow.generating + flow.kept + flow.batched
    assert count >= 0
    assert count == 0 or in_flight + count <= limit
    due = flow.generating == 0 and flow.kept < groups and flow.batched + groups <= limits.slots
    if due:
        assert count > 0, "nothing is generating and a batch is due"
    if refill == "generation_batches":
        assert count == (groups * factor if due else 0)


@pytest.mark.conformance(formula="consuming step - step of the oldest token's policy", setting="limits.max_staleness")
def test_staleness_counts_steps_to_the_oldest_span():
    assert staleness(consuming_step=7, oldest_step=5) == 2


def test_the_survival_estimate_halves_its_error_in_a_half_life():
    estimate = SurvivalEstimate(half_life=4)
    for _ in range(4):
        estimate.observe(kept=False)
    assert estimate.value == pytest.approx(0.5)
