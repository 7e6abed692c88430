"""Owns the clipped surrogate objective: what each token contributes, and whether clipping removed its gradient.

Must not reduce over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipped:
    """The clipped objective of N tokens, and which of them were clipped. Every tensor is [N].

    objective: the value to maximise, in the dtype of the ratio.
    low, high, dual: bool, True where the token is clipped at 1 - clip_low, at 1 + clip_high, or by the dual clip.
    """

    objective: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clip_higher(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, all [N] (DAPO Eq. 8 and 10, Clip-Higher).

    The lower limit takes effect only where A < 0, the upper limit only where A > 0.

    Example with four tokens. The first is clipped at 1.28. The second has the same ratio but a negative advantage, so
    r A is the smaller term and the token keeps its gradient. The third is clipped at 0.8. The fourth is below 0.8 too,
    but its advantage is positive, so it is not clipped:

    >>> ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    >>> advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    >>> clipped = clip_higher(ratio, advantage, low=0.2, high=0.28)
    >>> clipped.objective
    tensor([ 1.2800, -1.5000, -0.8000,  0.5000])
    >>> clipped.low
    tensor([False, False,  True, False])
    >>> clipped.high
    tensor([ True, False, False, False])
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

    `high` is not used; the settings require it to equal `low`.

    >>> symmetric(torch.tensor([1.5]), torch.tensor([1.0]), low=0.2, high=0.2).objective
    tensor([1.2000])
    """
    return clip_higher(ratio, advantage, low, low)


def dual_clip(clipped: Clipped, ratio: Tensor, advantage: Tensor, bound: float) -> Clipped:
    """max(objective, bound x A) where A < 0, for a bound c > 1 (Ye et al., arXiv 1912.09729).

    Without the dual clip, the loss of a token with a negative advantage grows with its ratio without limit.

    Example with c = 3. The first token would contribute 4 x (-2) = -8 and is limited to 3 x (-2) = -6. The ratio of the
    second is below the bound. The third has a positive advantage, so the upper clip limits it (1.28 x 2):

    >>> ratio, advantage = torch.tensor([4.0, 2.9, 4.0]), torch.tensor([-2.0, -2.0, 2.0])
    >>> clipped = dual_clip(clip_higher(ratio, advantage, 0.2, 0.28), ratio, advantage, bound=3.0)
    >>> clipped.objective
    tensor([-6.0000, -5.8000,  2.5600])
    >>> clipped.dual
    tensor([ True, False, False])
    """
    binds = (advantage < 0) & (ratio > bound)
    return replace(clipped, objective=torch.where(binds, bound * advantage, clipped.objective), dual=binds)


CLIPPINGS: dict[str, Callable[[Tensor, Tensor, float, float], Clipped]] = {
    "clip_higher": clip_higher,
    "symmetric": symmetric,
}
"""The entries by `algorithm.clipping`. Arguments: ratio [N], advantage [N], clip_low, clip_high."""
