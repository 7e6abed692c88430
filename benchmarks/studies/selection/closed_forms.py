"""Owns the closed forms of screening: its cost, and its effect on the distribution of trained prompts.

Must not sample. simulate.py does, and is compared with these formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.sampler.selection.posterior import mixed


def samples_drawn(pass_rate: float, size: int, screened: int) -> float:
    """Mean number of samples per drawn prompt with a screen of `screened` samples; `screened` = `size`: no screen."""
    return screened + mixed(pass_rate, screened) * (size - screened)


def samples_per_kept(pass_rate: float, size: int, screened: int) -> float:
    """Samples generated per kept group, for prompts with this pass rate. Infinite at 0 and 1.

    Without a screen it is size / h(size), with a screen screened / h(screened) + size - screened, which is never less:
    at no pass rate between 0 and 1 does a screen save samples (p = 1/2, 4 of 16: 16.57 samples instead of 16.00). It
    saves samples on prompts that never give a mixed group, and by leaving groups untrained.
    """
    kept = mixed(pass_rate, screened)
    return samples_drawn(pass_rate, size, screened) / kept if kept else math.inf


def passes(correct: int, size: int, screened: int) -> float:
    """The probability that a group with `correct` of `size` correct answers passes its screen, which must be mixed.

    Hypergeometric. For a mixed group it is above 0 if screened >= 2, so weights of 1 / passes would undo the selection
    by the screen.
    """
    total = math.comb(size, screened)
    return 1.0 - (math.comb(correct, screened) + math.comb(size - correct, screened)) / total


def kept_distribution(rates: Sequence[float], weights: Sequence[float], screened: int) -> list[float]:
    """The distribution of kept groups over `rates`, the pass rates that prompts have with these `weights`. Sums to 1.

    `screened` = the size of the group: dynamic sampling without a screen. Raises ValueError if no group can be kept.
    """
    kept = [weight * mixed(rate, screened) for rate, weight in zip(rates, weights, strict=True)]
    total = math.fsum(kept)
    if not total:
        raise ValueError(f"rates: {list(rates)} is not valid: expected one between 0 and 1 with a weight above 0")
    return [share / total for share in kept]


def cost_over(rates: Sequence[float], weights: Sequence[float], size: int, screened: int) -> float:
    """Samples generated per kept group, if prompts with these pass rates and weights are drawn uniformly."""
    pairs = list(zip(rates, weights, strict=True))
    drawn = math.fsum(weight * samples_drawn(rate, size, screened) for rate, weight in pairs)
    return drawn / math.fsum(weight * mixed(rate, screened) for rate, weight in pairs)


def total_variation(first: Sequence[float], second: Sequence[float]) -> float:
    """Half the sum of the absolute differences of two distributions over the same values: 0 if equal, 1 if disjoint."""
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(first, second, strict=True))
