"""The starvation escalation: the level after so many judged groups, and one report per change of level."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.queue.starvation import Level, Starvation, level_of
from services.settings import StarvationSettings

pytestmark = pytest.mark.conformance(
    formula="response to a lack of kept groups",
    setting="dynamic_sampling.starvation",
)

NORMAL, WIDEN, BOUNDARY, PARTIAL, PAUSE = Level
HISTOGRAM = "groups by correct answers of 4: 9 with 0, 0 with 1, 0 with 2, 0 with 3, 1 with 4"


def escalation_of(*levels: int | None) -> StarvationSettings:
    """The escalation with these levels, from widen_after to pause_after."""
    return StarvationSettings.model_validate(dict(zip(StarvationSettings.model_fields, levels, strict=True)))


OFF = escalation_of(None, None, None, None)
STEEP = escalation_of(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("judged", "kept", "expected"),
    [
        (0, 0, NORMAL),
        (31, 0, NORMAL),
        (32, 0, WIDEN),
        (63, 0, WIDEN),
        (64, 0, BOUNDARY),
        (127, 3, BOUNDARY),
        (128, 3, PARTIAL),
        (128, 0, BOUNDARY),  # no partial batch without a kept group
        (255, 0, BOUNDARY),
        (256, 0, PAUSE),
        (256, 1, PARTIAL),
        (9999, 1, PARTIAL),  # a kept group is trained, not left waiting
        (9999, 8, NORMAL),  # a whole batch waits for the learner
    ],
)
def test_the_default_escalation(judged: int, kept: int, expected: Level) -> None:
    assert level_of(StarvationSettings(), judged, kept, groups_per_step=8) is expected


@pytest.mark.parametrize(
    ("escalation", "judged", "kept", "expected"),
    [
        (OFF, 9999, 0, NORMAL),
        (OFF, 9999, 3, NORMAL),
        (escalation_of(None, 4, 8, 16), 31, 0, NORMAL),
        (escalation_of(None, 4, 8, 16), 32, 0, BOUNDARY),
        (escalation_of(2, None, 8, 16), 64, 0, WIDEN),
        (escalation_of(2, None, 8, 16), 64, 1, PARTIAL),
        (escalation_of(2, 4, None, 16), 127, 3, BOUNDARY),
        (escalation_of(2, 4, None, 16), 128, 3, PAUSE),  # partial batches are off: kept groups wait
        (escalation_of(2, 4, 8, None), 9999, 0, BOUNDARY),
        (escalation_of(None, None, None, 1), 8, 0, PAUSE),
    ],
)
def test_null_skips_a_level(escalation: StarvationSettings, judged: int, kept: int, expected: Level) -> None:
    assert level_of(escalation, judged, kept, groups_per_step=8) is expected


@pytest.mark.parametrize(
    ("levels", "named"),
    [
        ((0, 4, 8, 16), "widen_after\n  Input should be greater than 0"),
        ((2, 2, 8, 16), "boundary_after: 2 is not valid"),
        ((2, 4, 3, 16), "partial_after: 3 is not valid"),
        ((5, None, None, 5), "pause_after: 5 is not valid"),
        ((None, 4, None, 3), "pause_after: 3 is not valid"),
    ],
)
def test_levels_must_increase(levels: tuple[int | None, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        escalation_of(*levels)


@st.composite
def escalations(draw: st.DrawFn) -> StarvationSettings:
    after = sorted(draw(st.sets(st.integers(1, 40), min_size=4, max_size=4)))
    return escalation_of(*(threshold if draw(st.booleans()) else None for threshold in after))


@given(
    escalation=escalations(), kept=st.integers(0, 10), groups=st.integers(1, 10), judged=st.lists(st.integers(0, 500))
)
def test_more_judged_groups_never_lower_the_level(
    escalation: StarvationSettings, kept: int, groups: int, judged: list[int]
) -> None:
    levels = [level_of(escalation, count, kept, groups) for count in sorted(judged)]
    assert levels == sorted(levels)
    assert all(kept < groups for level in levels if level)
    assert all(kept for level in levels if level is PARTIAL)
    assert all(not kept or escalation.partial_after is None for level in levels if level is PAUSE)


@given(escalation=escalations(), groups=st.integers(1, 6), events=st.lists(st.sampled_from("jjjjjjkb"), max_size=200))
def test_every_change_of_level_is_returned_exactly_once(
    escalation: StarvationSettings, groups: int, events: list[str]
) -> None:
    """j: a filtered group, k: a kept group, b: a batch of the kept groups."""
    starvation, kept, levels = Starvation(escalation, groups), 0, [NORMAL]
    for event in events:
        if event == "b":
            starvation.begin()
            kept = 0
        else:
            starvation.group_judged()
            kept += event == "k"
        change = starvation.update(kept, HISTOGRAM)
        assert starvation.update(kept, HISTOGRAM) is None
        if change is not None:
            levels.append(change.level)
        assert levels[-1] is starvation.level is level_of(escalation, starvation.judged, kept, groups)
    assert all(level is not following for level, following in pairwise(levels))


def test_a_change_reports_counts_response_and_histogram() -> None:
    starvation = Starvation(STEEP, 4)
    updates = []
    for kept in [0] * 33 + [1] + [0] * 30:
        starvation.group_judged()
        updates.append(starvation.update(kept, HISTOGRAM))
    starvation.begin()
    updates.append(starvation.update(0, HISTOGRAM))
    changes = [change for change in updates if change is not None]
    assert [change.kind for change in changes] == [
        "starvation-widen",
        "starvation-boundary",
        "starvation-partial",
        "starvation-boundary",
        "starvation-pause",
        "starvation-over",
    ]
    assert changes[0].text == (
        "8 groups judged since the last batch, 0 of 4 kept: as many groups as limits.max_inflight_groups allows are "
        f"now in flight; {HISTOGRAM}"
    )
    assert "34 groups judged since the last batch, 1 of 4 kept: the kept groups are trained" in changes[2].text
    assert "the run pauses" in changes[4].text
    assert all(HISTOGRAM in change.text for change in changes[:-1])


def test_a_restart_with_the_same_state_reports_no_change() -> None:
    first = Starvation(STEEP, 4)
    for _ in range(9):
        first.group_judged()
    assert first.update(0, HISTOGRAM) is not None
    successor = Starvation(STEEP, 4, first.judged, first.level)
    assert successor.update(0, HISTOGRAM) is None


def test_force_moves_to_the_last_levels_at_once() -> None:
    starvation = Starvation(OFF, 4)
    partial = starvation.force(3, HISTOGRAM)
    assert partial is not None
    assert partial.level is PARTIAL
    assert starvation.force(3, HISTOGRAM) is None
    pause = starvation.force(0, HISTOGRAM)
    assert pause is not None
    assert pause.kind == "starvation-pause"
    over = starvation.force(4, HISTOGRAM)
    assert over is not None
    assert over.level is NORMAL
