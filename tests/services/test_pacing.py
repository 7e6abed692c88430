"""Back-pressure by slots, as a table."""

import pytest

from services.sampler.pacing import Flow, SurvivalEstimate, groups_to_dispatch, slots, staleness


@pytest.mark.parametrize(
    ("max_staleness", "steps_left", "expected"), [(0, 12, 8), (1, 12, 16), (1, 1, 8), (3, 12, 32), (1, 0, 0)]
)
def test_slots(max_staleness, steps_left, expected):
    assert slots(8, max_staleness, steps_left) == expected


@pytest.mark.parametrize(
    ("flow", "wanted", "max_inflight", "expected"),
    [
        (Flow(generating=0, kept=0, batched=0, survival=1.0), 16, 64, 16),
        (Flow(generating=0, kept=0, batched=0, survival=0.5), 16, 64, 32),
        (Flow(generating=0, kept=0, batched=0, survival=0.5), 16, 24, 24),
        (Flow(generating=16, kept=0, batched=0, survival=0.5), 16, 64, 16),
        (Flow(generating=0, kept=8, batched=8, survival=0.5), 16, 64, 0),
        (Flow(generating=4, kept=8, batched=2, survival=0.5), 16, 64, 8),
        (Flow(generating=20, kept=0, batched=0, survival=1.0), 16, 64, 0),
        (Flow(generating=0, kept=0, batched=0, survival=0.0), 16, 64, 64),
    ],
)
def test_groups_to_dispatch(flow, wanted, max_inflight, expected):
    assert groups_to_dispatch(flow, wanted, max_inflight) == expected


def test_staleness_counts_versions_to_the_oldest_span():
    assert staleness(consuming_version=7, oldest_version=5) == 2


def test_survival_halves_its_distance_in_a_half_life():
    estimate = SurvivalEstimate(half_life=4)
    for _ in range(4):
        estimate.observe(kept=False)
    assert estimate.value == pytest.approx(0.5)
