"""Owns the clipped surrogate: what one token contributes, and whether clipping cut its gradient.

Must not reduce over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipped:
    """Per token, all [N]: `objective` to maximise, in the ratio's dtype.

    Bool, whether it is clipped: `low` at 1 - clip_low, `high` at 1 + clip_high, `dual` at the dual clip's bound.
    """

    objective: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clip_higher(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A), all [N] (DAPO Eq. 8 and 10, Clip-Higher).

    The lower bound binds only where A < 0, the upper one only where A > 0.
    """
    bounded = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return Clipped(
        objective=torch.minimum(ratio * advantage, bounded * advantage),
        low=(ratio < 1.0 - low) & (advantage < 0),
        high=(ratio > 1.0 + high) & (advantage > 0),
        dual=torch.zeros_like(ratio, dtype=torch.bool),
    )


def symmetric(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + low) A): one epsilon on both sides (PPO, arXiv 1707.06347 Eq. 7; GRPO).

    `high` is unused; the settings hold it equal to `low`.
    """
    return clip_higher(ratio, advantage, low, low)


def dual_clip(clipped: Clipped, ratio: Tensor, advantage: Tensor, bound: float) -> Clipped:
    """max(objective, bound x A) where A < 0, for a bound c > 1 (Ye et al., arXiv 1912.09729).

    Without it the loss of a token that became likelier against its advantage grows with the ratio, without end.
    """
    binds = (advantage < 0) & (ratio > bound)
    return replace(clipped, objective=torch.where(binds, bound * advantage, clipped.objective), dual=binds)


CLIPPINGS: dict[str, Callable[[Tensor, Tensor, float, float], Clipped]] = {
    "clip_higher": clip_higher,
    "symmetric": symmetric,
}
"""By algorithm.clipping: (ratio, advantage, clip_low, clip_high)."""
