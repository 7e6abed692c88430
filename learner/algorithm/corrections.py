"""Owns off-policy corrections: one weight per token for the gap between the proximal and the behaviour policy.

Must not change the ratio that is clipped. The weights carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from learner.algorithm.kl import k3
from learner.algorithm.ratios import LARGEST_GAP, log_ratio, response_sums


class WeightLimits(NamedTuple):
    """The limits of the weights: `cap` truncates them; IcePop keeps importance in [`low`, `high`]."""

    cap: float
    low: float
    high: float


class Weighted(NamedTuple):
    """The weights of N tokens. `weight` [N] multiplies the objective.

    capped, masked: bool [N], True where the cap lowered the weight, or where the token was masked (weight 0).
    """

    weight: Tensor
    capped: Tensor
    masked: Tensor


@dataclass(frozen=True)
class Correction:
    """The weights of N tokens and the gap that they correct. Every tensor is [N], without gradient.

    The gap is measured in the same way for every correction: `log_importance` = proximal - behaviour (nats);
    `importance` is its exponential w, neither capped nor masked; `mismatch_kl` is the estimate (w - 1) - log w >= 0 of
    KL(behaviour || proximal).
    """

    weighted: Weighted
    log_importance: Tensor
    importance: Tensor
    mismatch_kl: Tensor


def _never(gap: Tensor) -> Tensor:
    return torch.zeros_like(gap, dtype=torch.bool)


def none(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """Weight 1 for every token."""
    return Weighted(torch.ones_like(gap), _never(gap), _never(gap))


def importance(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = exp(gap), limited only by LARGEST_GAP: the decoupled objective (arXiv 2110.00641)."""
    return Weighted(torch.exp(gap), _never(gap), _never(gap))


def truncated_is(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = min(exp(gap), cap) per token (truncated importance sampling: arXiv 1802.01561).

    >>> gap = torch.tensor([0.5, 1.5, 3.0]).log()
    >>> truncated_is(gap, torch.tensor([0, 0, 0]), WeightLimits(cap=2.0, low=0.5, high=5.0)).weight
    tensor([0.5000, 1.5000, 2.0000])
    """
    weight = torch.exp(gap)
    return Weighted(weight.clamp(max=limits.cap), weight > limits.cap, _never(gap))


def truncated_is_sequence(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = min(product of exp(gap) over the tokens of the response, cap), the same for each of its tokens.

    The product of the ratios is the likelihood ratio of the response. Its logarithm is clamped to +-LARGEST_GAP too.

    Example with two responses of two tokens: the products are 2 x 3 = 6, which is capped, and 0.4 x 0.5 = 0.2:

    >>> gap = torch.tensor([2.0, 3.0, 0.4, 0.5]).log()
    >>> weighted = truncated_is_sequence(gap, torch.tensor([0, 0, 1, 1]), WeightLimits(cap=2.0, low=0.5, high=5.0))
    >>> weighted.weight
    tensor([2.0000, 2.0000, 0.2000, 0.2000])
    >>> weighted.capped
    tensor([ True,  True, False, False])
    """
    totals = response_sums(gap, sample).clamp(-LARGEST_GAP, LARGEST_GAP)
    return truncated_is(totals[sample].to(gap.dtype), sample, limits)


def icepop(gap: Tensor, sample: Tensor, limits: WeightLimits) -> Weighted:
    """weight = exp(gap) if it is in [low, high], else 0: the token is masked (IcePop, Ling Team 2025).

    A masked token stays in the count of the reduction, so the normaliser of the mini-batch does not depend on the
    policy.

    >>> gap = torch.tensor([0.4, 1.5, 6.0]).log()
    >>> weighted = icepop(gap, torch.tensor([0, 0, 0]), WeightLimits(cap=2.0, low=0.5, high=5.0))
    >>> weighted.weight
    tensor([0.0000, 1.5000, 0.0000])
    >>> weighted.masked
    tensor([ True, False,  True])
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
"""The entries by `Recipe.correction`. Arguments: gap [N] = proximal - behaviour in nats; sample [N], the response of
each token, as in TokenData; the limits."""


def correct(name: str, proximal: Tensor, behaviour: Tensor, sample: Tensor, limits: WeightLimits) -> Correction:
    """Apply the correction `name` of CORRECTIONS.

    proximal, behaviour: log-probs [N], nats; the results have their dtype. sample: int64 [N], as in TokenData.

    Example: the proximal policy gives two tokens probability 0.5 and 0.1, the behaviour policy gave them 0.25 and 0.2.
    The importance is 2 and 0.5. The mismatch is (2 - 1) - ln 2 = 0.3069 and (0.5 - 1) - ln 0.5 = 0.1931:

    >>> proximal, behaviour = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.25, 0.2]).log()
    >>> limits = WeightLimits(cap=1.5, low=0.5, high=5.0)
    >>> correction = correct("truncated_is", proximal, behaviour, torch.tensor([0, 0]), limits)
    >>> correction.importance
    tensor([2.0000, 0.5000])
    >>> correction.weighted.weight
    tensor([1.5000, 0.5000])
    >>> correction.mismatch_kl
    tensor([0.3069, 0.1931])
    """
    proximal, behaviour = proximal.detach(), behaviour.detach()
    gap = log_ratio(proximal, behaviour)
    return Correction(CORRECTIONS[name](gap, sample, limits), gap, torch.exp(gap), k3(behaviour, proximal))


def effective_share(total: float, total_of_squares: float, tokens: float) -> float:
    """Kish's effective sample size divided by the sample size: (sum w)^2 / (n sum w^2), in (0, 1].

    Equal weights give 1. A few large weights bring it close to 0. It is 0 without tokens.

    Example: the weights 2, 2, 2, 2 sum to 8 and their squares to 16; 4, 0, 0, 0 sum to 4 and their squares to 16:

    >>> effective_share(total=8.0, total_of_squares=16.0, tokens=4.0)
    1.0
    >>> effective_share(total=4.0, total_of_squares=16.0, tokens=4.0)
    0.25
    """
    return total * total / (tokens * total_of_squares) if tokens and total_of_squares else 0.0
