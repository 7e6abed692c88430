"""Owns the screen: whether the first samples of a group are reason to generate the rest, and what that does to a run.

Must not generate, nor decide whether a whole group is kept; credit does.

The caveat. Dynamic sampling keeps a full group of G with probability h(G) = 1 - p^G - (1-p)^G. Behind a screen of k it
is kept iff the screen is mixed, with probability h(k): a mixed screen cannot become an unmixed group. So a prompt is
trained h(k) / h(G) times as often, which falls from about 1 - 2^(1-k) at p = 1/2 to k / G where p goes to 0 or 1: rare
successes are what a screen misses. Within a prompt, too, a group with few right (or few wrong) answers is less likely
to pass (`passes` in benchmarks/selection/closed_forms.py), so that the accuracy of what is trained is drawn towards
1/2. A screen before the rest is SPEED-RL's (arXiv 2506.09016), where the shift is the aim; here it is a strategy with
a price, and `uniform` the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.contracts import Outcome, Release

COMPLETE = "complete"


def screen(outcomes: Sequence[Outcome], group_size: int, min_known: int) -> str:
    """How a group goes on whose first samples have these outcomes: COMPLETE, or the name of its release.

    Filtered iff every verdict is known and all are alike: an unknown one leaves room for another answer. Dead when too
    many are unknown for `min_known` known ones in the whole group, whose rest would be generated for nothing.
    """
    unknown = sum(outcome is Outcome.UNKNOWN for outcome in outcomes)
    if group_size - unknown < min_known:
        return Release.DEAD.value
    if unknown == 0 and len(set(outcomes)) < 2:
        return Release.FILTERED.value
    return COMPLETE
