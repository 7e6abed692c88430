"""Owns off-policy corrections: a weight per token for the gap between proximal and behaviour policy.

Must not touch the ratio that is clipped; these weights carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from learner.algorithm.kl import k3
from learner.algorithm.ratios import LARGEST_GAP, log_ratio


class WeightLimits(NamedTuple):
    """What a correction may be bounded by: the truncated weights' `cap`, and the importance IcePop lets through."""

    cap: float
    low: float
    high: float


class Weighted(NamedTuple):
    """Per token, all [N]: `weight` multiplies the objective; bool: `capped` by the cap, `masked` to 0."""

    weight: Tensor
    capped: Tensor
    masked: Tensor


@dataclass(frozen=True)
class Correction:
    """Per token, all [N] without gradient: the weights, and the gap they answer to, measured the same for all.

    log_importance = proximal - behaviour (nats), importance its exponential, neither capped nor masked; mismatch_kl:
    the estimate (w - 1) - log w >= 0 of KL(behaviour || proximal), w the importance.
    """

    weighted: Weighted
    log_importance: Tensor
    importance: Tensor
    mismatch_kl: Tensor


def _never(gap: Tensor) -> Tensor:
    return torch.zeros_like(gap, dtype=torch.bool)


def none(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """Weight 1 everywhere."""
    return Weighted(torch.ones_like(gap), _never(gap), _never(gap))


def importance(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = exp(gap), unbounded but for LARGEST_GAP: the decoupled objective (arXiv 2110.00641)."""
    return Weighted(torch.exp(gap), _never(gap), _never(gap))


def truncated_is(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = min(exp(gap), cap), per token (truncation: arXiv 1802.01561)."""
    weight = torch.exp(gap)
    return Weighted(weight.clamp(max=limits.cap), weight > limits.cap, _never(gap))


def truncated_is_sequence(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = min(product of exp(gap) over the response's tokens, cap), the same for each of its tokens.

    The product of the ratios is the response's likelihood ratio; its logarithm is cut to +-LARGEST_GAP as well.
    """
    # In float64, so that the order in which a GPU adds up a long response does not show.
    sums = torch.zeros(int(sample.max()) + 1, dtype=torch.float64, device=gap.device)
    totals = sums.index_add(0, sample, gap.double()).clamp(-LARGEST_GAP, LARGEST_GAP)
    return truncated_is(totals[sample].to(gap.dtype), sample, limits)


def icepop(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = exp(gap) where it lies in [low, high], else 0: the token is left out (IcePop, Ling Team 2025).

    A token left out stays in the reduction's count: the mini-batch's normaliser does not depend on the policy.
    """
    weight = torch.exp(gap)
    masked = (weight < limits.low) | (weight > limits.high)
    return Weighted(weight.masked_fill(masked, 0.0), _never(gap), masked)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, WeightLimits], Weighted]] = {
    "none": none,
    "importance": importance,
    "truncated_is": truncated_is,
    "truncated_is_sequence": truncated_is_sequence,
    "icepop": icepop,
}
"""By Recipe.correction: (gap [N] = proximal - behaviour in nats, sample [N] as in TokenData, limits)."""


def correct(name: str, proximal: Tensor, behaviour: Tensor, sample: Tensor, limits: WeightLimits) -> Correction:
    """Apply the table's entry `name`. Log-probs are [N]; results have their dtype; `sample` is int64 [N]."""
    proximal, behaviour = proximal.detach(), behaviour.detach()
    gap = log_ratio(proximal, behaviour)
    return Correction(CORRECTIONS[name](gap, sample, limits), gap, torch.exp(gap), k3(behaviour, proximal))


def effective_share(total: float, total_of_squares: float, tokens: float) -> float:
    """Kish's effective sample size over the sample size, (sum w)^2 / (n sum w^2), in (0, 1]; 1 for equal weights."""
    return total * total / (tokens * total_of_squares) if tokens and total_of_squares else 0.0
