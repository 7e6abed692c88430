"""Screening: which groups are completed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts import Outcome
from services.sampler.advantage.filtering import FILTERS, KEPT, FilterRule, decide
from services.sampler.selection.screening import COMPLETE, screen

pytestmark = pytest.mark.conformance(
    formula="a screened group is completed unless its first verdicts are all equal",
    setting="selection.strategy = screen",
)

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("outcomes", "min_known", "expected"),
    [
        ([C, W, C, C], 16, COMPLETE),
        ([C, C, C, C], 16, "filtered"),
        ([W, W, W, W], 16, "filtered"),
        ([C, C, C, U], 12, COMPLETE),
        ([W, U, W, W], 15, COMPLETE),  # the unknown outcome may be a correct one
        ([U, U, U, U], 12, COMPLETE),
        ([U, U, U, U], 13, "dead"),
        ([C, W, C, U], 16, "dead"),  # 16 known verdicts are out of reach: the other samples would be wasted
        ([C, W, C, U], 15, COMPLETE),
    ],
)
def test_screens(outcomes: list[Outcome], min_known: int, expected: str) -> None:
    assert screen(outcomes, 16, min_known) == expected


@pytest.mark.parametrize(
    ("outcomes", "scores", "min_known", "expected"),
    [
        ([W, W, W, W], [0.2, 0.2, 0.5, 0.2], 16, COMPLETE),
        ([C, W, C, W], [0.5, 0.45, 0.5, 0.45], 16, "filtered"),
        ([W, W, W, U], [0.2, 0.2, 0.2, 0.9], 15, COMPLETE),  # the unknown score may be another one
        ([W, W, W, U], [0.2, 0.9, 0.2, 0.2], 16, "dead"),
    ],
)
def test_screens_by_spread(outcomes: list[Outcome], scores: list[float], min_known: int, expected: str) -> None:
    assert screen(outcomes, 16, min_known, scores, FilterRule("spread", 0.1)) == expected


@given(
    outcomes=st.lists(st.sampled_from(Outcome), min_size=8, max_size=8),
    scores=st.lists(st.sampled_from([0.0, 0.2, 0.25, 0.5, 1.0]), min_size=8, max_size=8),
    name=st.sampled_from(sorted(FILTERS)),
    screened=st.integers(2, 7),
    min_known=st.integers(1, 8),
)
def test_the_screen_never_contradicts_the_filter(
    outcomes: list[Outcome], scores: list[float], name: str, screened: int, min_known: int
) -> None:
    rule = FilterRule(name, 0.1)
    screened_as = screen(outcomes[:screened], 8, min_known, scores[:screened], rule)
    whole = decide(outcomes, min_known, True, scores, rule)
    if screened_as == "dead":
        assert whole == "dead"
    if U not in outcomes and screened_as == COMPLETE:
        assert whole == KEPT, "a mixed screen cannot become an unmixed group"
    if U not in outcomes and whole == "filtered":
        assert screened_as == "filtered"
