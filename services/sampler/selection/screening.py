"""Owns the screen: whether the first samples of a group are reason to generate the rest, and what that does to a run.

Must not generate, nor decide whether a whole group is kept; credit does.

The caveat. Dynamic sampling keeps a full group of G with probability h(G) = 1 - p^G - (1-p)^G. Behind a screen of k
it is kept iff the screen is mixed, with probability h(k): a mixed screen cannot become an unmixed group. So a prompt is
trained h(k) / h(G) times as often, which falls from about 1 - 2^(1-k) at p = 1/2 to k / G where p goes to 0 or 1: rare
successes are what a screen misses. Within a prompt, too, a group with few right (or few wrong) answers is less likely
to pass (`passes`), so that the accuracy of what is trained is drawn towards 1/2. A screen before the rest is SPEED-RL's
(arXiv 2506.09016), where the shift is the aim; here it is a strategy with a price, and `uniform` the default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.contracts import Outcome, Release
from services.sampler.selection.posterior import mixed

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


def samples_drawn(pass_rate: float, size: int, screened: int) -> float:
    """Samples that one drawn prompt costs on average, behind a screen of `screened`; `size` of them: no screen."""
    return screened + mixed(pass_rate, screened) * (size - screened)


def samples_per_kept(pass_rate: float, size: int, screened: int) -> float:
    """Samples generated for each kept group of prompts with this pass rate; infinite at 0 and 1.

    Without a screen size / h(size), with one screened / h(screened) + size - screened, which is never less: at no rate
    between 0 and 1 does a screen save anything (p = 1/2, 4 of 16: 16.57 samples in place of 16.00). It saves on prompts
    that give no mixed group at all, and by what it leaves untrained.
    """
    kept = mixed(pass_rate, screened)
    return samples_drawn(pass_rate, size, screened) / kept if kept else math.inf


def passes(correct: int, size: int, screened: int) -> float:
    """The chance that a group with `correct` of `size` right answers passes its screen: that the screen is mixed.

    Hypergeometric. For a mixed group it is above 0 if screened >= 2: 1 / passes would undo the screen's selection.
    """
    total = math.comb(size, screened)
    return 1.0 - (math.comb(correct, screened) + math.comb(size - correct, screened)) / total


def kept_distribution(rates: Sequence[float], weights: Sequence[float], screened: int) -> list[float]:
    """How kept groups spread over pass rates that prompts have with these weights; sums to 1.

    `screened` = the group's size: dynamic sampling without a screen. Raises ValueError if no group can be kept.
    """
    kept = [weight * mixed(rate, screened) for rate, weight in zip(rates, weights, strict=True)]
    total = math.fsum(kept)
    if not total:
        raise ValueError("rates: at least one strictly between 0 and 1, with a weight above 0, is needed")
    return [one / total for one in kept]


def cost_over(rates: Sequence[float], weights: Sequence[float], size: int, screened: int) -> float:
    """Samples generated for each kept group, over prompts with these pass rates and weights that are drawn alike."""
    pairs = list(zip(rates, weights, strict=True))
    drawn = math.fsum(weight * samples_drawn(rate, size, screened) for rate, weight in pairs)
    return drawn / math.fsum(weight * mixed(rate, screened) for rate, weight in pairs)


def total_variation(one: Sequence[float], other: Sequence[float]) -> float:
    """Half the sum of absolute differences of two distributions over the same places: 0 alike, 1 disjoint."""
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(one, other, strict=True))
