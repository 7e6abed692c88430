"""Owns off-policy corrections: a weight per token for the gap between proximal and behaviour policy.

Must not touch the ratio that is clipped; these weights carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_GAP = 20.0
"""Nats beyond which log-ratios are cut, so that one odd token makes no metric infinite; far above any cap."""


@dataclass(frozen=True)
class Correction:
    """Per token, all [N] float32 without gradient.

    weight multiplies the objective; importance = exp(proximal - behaviour), uncapped; capped: 1 where the weight was
    cut; mismatch_kl: the estimate (w - 1) - log w >= 0 of KL(behaviour || proximal), w the importance
    (Schulman's k3).
    """

    weight: Tensor
    importance: Tensor
    capped: Tensor
    mismatch_kl: Tensor


def _gap(proximal: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    gap = (proximal - behaviour).detach().clamp(-LARGEST_GAP, LARGEST_GAP)
    # In float64: (w - 1) - log w of a tiny gap is lost in float32, even its sign.
    exact = gap.double()
    return torch.exp(gap), (torch.expm1(exact) - exact).to(gap.dtype)


def none(proximal: Tensor, behaviour: Tensor, cap: float) -> Correction:
    """Weight 1 everywhere; the gap is still measured. Log-probs are [N] float32; `cap` is unused."""
    importance, mismatch = _gap(proximal, behaviour)
    return Correction(torch.ones_like(importance), importance, torch.zeros_like(importance), mismatch)


def truncated_is(proximal: Tensor, behaviour: Tensor, cap: float) -> Correction:
    """weight = min(exp(proximal - behaviour), cap): truncated importance sampling of decoupled PPO.

    Log-probs are [N] float32 (decoupled objective: arXiv 2110.00641; truncation: arXiv 1802.01561).
    """
    importance, mismatch = _gap(proximal, behaviour)
    return Correction(importance.clamp(max=cap), importance, (importance > cap).float(), mismatch)


def effective_share(total: float, total_of_squares: float, tokens: float) -> float:
    """Kish's effective sample size over the sample size, (sum w)^2 / (n sum w^2), in (0, 1]; 1 for equal weights."""
    return total * total / (tokens * total_of_squares) if tokens and total_of_squares else 0.0


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float], Correction]] = {
    "none": none,
    "truncated_is": truncated_is,
}
