"""Owns the dynamic-sampling rule: which judged groups carry a learning signal.

Must not look at shaped rewards; the rules are on accuracy (paper Eq. 8's constraint), or on the verdicts' scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from services.contracts import Outcome, Release

KEPT = "kept"
ROUNDING = 1e-9
"""Two scores that are written `min_spread` apart may differ by a little less: 0.35 - 0.3 < 0.05."""


def accuracy(outcomes: Sequence[Outcome], scores: Sequence[float], min_spread: float) -> bool:
    """Whether the known verdicts are neither all correct nor all wrong (DAPO Eq. 11)."""
    known = sum(outcome is not Outcome.UNKNOWN for outcome in outcomes)
    correct = sum(outcome is Outcome.CORRECT for outcome in outcomes)
    return 0 < correct < known


def spread(outcomes: Sequence[Outcome], scores: Sequence[float], min_spread: float) -> bool:
    """Whether the highest score of a known verdict is at least `min_spread` above the lowest. One score per outcome."""
    known = [score for outcome, score in zip(outcomes, scores, strict=True) if outcome is not Outcome.UNKNOWN]
    return bool(known) and max(known) - min(known) >= min_spread - ROUNDING


class GroupFilter(NamedTuple):
    """A filter: (outcomes, scores, min_spread) -> whether the known verdicts of a group carry a signal.

    `follows_pass_rate`: whether the pass rate of a prompt says how likely its groups are to be kept.
    """

    keeps: Callable[[Sequence[Outcome], Sequence[float], float], bool]
    follows_pass_rate: bool


FILTERS: Mapping[str, GroupFilter] = {
    "accuracy": GroupFilter(accuracy, follows_pass_rate=True),
    "spread": GroupFilter(spread, follows_pass_rate=False),
}
"""By algorithm.dynamic_sampling.filter. More verdicts never turn a group that is kept into one that is not."""


class FilterRule(NamedTuple):
    """`name`: an entry of FILTERS; `min_spread`: the setting, in (0, 1], which `spread` alone reads."""

    name: str
    min_spread: float

    def keeps(self, outcomes: Sequence[Outcome], scores: Sequence[float]) -> bool:
        """Whether the known ones of these verdicts carry a signal."""
        return FILTERS[self.name].keeps(outcomes, scores, self.min_spread)


BY_ACCURACY = FilterRule("accuracy", 1.0)
"""The paper's rule."""


def decide(
    outcomes: Sequence[Outcome],
    min_known: int,
    enabled: bool,
    scores: Sequence[float] = (),
    rule: FilterRule = BY_ACCURACY,
) -> str:
    """The decision on a fully judged group: KEPT, or the name of its release.

    Kept iff `rule` keeps it and at least `min_known` verdicts are known. A group with too few known verdicts is dead.
    Without dynamic sampling (`enabled` false), every group with enough known verdicts is kept. `scores`: one per
    outcome; the rule on accuracy needs none.
    """
    known = sum(outcome is not Outcome.UNKNOWN for outcome in outcomes)
    if known < min_known:
        return Release.DEAD.value
    if enabled and not rule.keeps(outcomes, scores):
        return Release.FILTERED.value
    return KEPT
