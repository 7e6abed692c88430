"""Back-pressure by slots: tables of cases, and the properties of every refill rule for any flow."""

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
