"""Owns the clipped surrogate: what one token contributes, and whether clipping cut its gradient.

Must not reduce over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipped:
    """Per token, all [N]: `objective` to maximise (float32); `low`, `high`: bool, clipped at that bound."""

    objective: Tensor
    low: Tensor
    high: Tensor


def clip_higher(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A), all [N] (DAPO Eq. 8, Clip-Higher).

    The lower bound binds only where A < 0, the upper one only where A > 0.
    """
    bounded = torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return Clipped(
        objective=torch.minimum(ratio * advantage, bounded * advantage),
        low=(ratio < 1.0 - low) & (advantage < 0),
        high=(ratio > 1.0 + high) & (advantage > 0),
    )


CLIPPINGS: dict[str, Callable[[Tensor, Tensor, float, float], Clipped]] = {"dapo": clip_higher}
"""By settings.Algorithm.preset."""
