"""Owns what a screen costs and what it does to the distribution of trained prompts, in closed form.

Must not sample; simulate.py does, and is held against these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.sampler.selection.posterior import mixed


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
