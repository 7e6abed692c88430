"""Owns the dynamic-sampling rule: which judged groups carry a learning signal.

Must not look at shaped rewards; the rule is on accuracy (paper Eq. 8's constraint).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.contracts import Outcome, Release

KEPT = "kept"


def decide(outcomes: Sequence[Outcome], min_known: int, enabled: bool) -> str:
    """The decision on a fully judged group: KEPT, or the name of its release.

    Kept iff 0 < correct < known and known >= `min_known`. A group with too few known verdicts is dead. Without
    dynamic sampling (`enabled` false), every group with enough known verdicts is kept.
    """
    known = sum(outcome is not Outcome.UNKNOWN for outcome in outcomes)
    correct = sum(outcome is Outcome.CORRECT for outcome in outcomes)
    if known < min_known:
        return Release.DEAD.value
    if enabled and not 0 < correct < known:
        return Release.FILTERED.value
    return KEPT
