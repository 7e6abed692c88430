"""Owns screening: whether the other samples of a group are generated, given the verdicts on its first samples.

Must not generate samples, or decide on a fully judged group; `advantage.filtering` does.

Screening biases training. Dynamic sampling keeps a full group of G with probability h(G) = 1 - p^G - (1-p)^G. After a
screen of k it is kept iff the screen is mixed, with probability h(k), because a mixed screen cannot become an unmixed
group. So a prompt is trained h(k) / h(G) times as often. This falls from about 1 - 2^(1-k) at p = 1/2 to k / G as p
goes to 0 or 1: a screen misses rare successes. Within a prompt, too, a group with few right (or few wrong) answers is
less likely to pass (`passes` in benchmarks/studies/selection/closed_forms.py), so that the accuracy of trained groups
shifts towards 1/2. SPEED-RL (arXiv 2506.09016) screens in order to get this shift. Here screening is an option with a
cost, and `uniform` is the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.contracts import Outcome, Release
from services.sampler.advantage.filtering import BY_ACCURACY, FilterRule

COMPLETE = "complete"


def screen(
    outcomes: Sequence[Outcome],
    group_size: int,
    min_known: int,
    scores: Sequence[float] = (),
    rule: FilterRule = BY_ACCURACY,
) -> str:
    """The decision on a group whose first samples have these outcomes: COMPLETE, or the name of its release.

    Filtered iff all verdicts are known and `rule` keeps nothing of them (by accuracy: they are equal), because an
    unknown one may hide a different outcome. Dead if too many are unknown for the whole group to get `min_known` known
    verdicts: generating the other samples would be wasted. `scores`: as for advantage.filtering.decide.
    """
    unknown = sum(outcome is Outcome.UNKNOWN for outcome in outcomes)
    if group_size - unknown < min_known:
        return Release.DEAD.value
    if unknown == 0 and not rule.keeps(outcomes, scores):
        return Release.FILTERED.value
    return COMPLETE
