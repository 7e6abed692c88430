"""Owns the clipped surrogate objective: what each token contributes, and whether its ratio was clipped.

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
    low, high, dual: bool, True where the token is clipped at 1 - clip_low, at 1 + clip_high, or by the dual clip. A
    clipped token has no gradient, except with `cispo`.
    """

    objective: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def clip_higher(logprobs: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, all [N] (DAPO Eq. 8 and 10, Clip-Higher).

    The lower limit takes effect only where A < 0, the upper limit only where A > 0. `logprobs` is not used.

    Example with four tokens. The first is clipped at 1.28. The second has the same ratio but a negative advantage, so
    r A is the smaller term and the token keeps its gradient. The third is clipped at 0.8. The fourth is below 0.8 too,
    but its advantage is positive, so it is not clipped:

    >>> ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    >>> advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    >>> clipped = clip_higher(torch.zeros(4), ratio, advantage, low=0.2, high=0.28)
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


def symmetric(logprobs: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + low) A): one epsilon on both sides (PPO, arXiv 1707.06347 Eq. 7; GRPO).

    `logprobs` and `high` are not used; the settings require `high` to equal `low`.

    >>> symmetric(torch.zeros(1), torch.tensor([1.5]), torch.tensor([1.0]), low=0.2, high=0.2).objective
    tensor([1.2000])
    """
    return clip_higher(logprobs, ratio, advantage, low, low)


def cispo(logprobs: Tensor, ratio: Tensor, advantage: Tensor, low: float, high: float) -> Clipped:
    """sg(clip(r, 1 - low, 1 + high)) A log pi per token, all [N] (CISPO, MiniMax-M1, arXiv 2506.13585 Eq. 4 and 5).

    The clipped ratio is a weight without gradient (sg), whatever the sign of A. The gradient flows through `logprobs`,
    so no token loses it. With `low` = 1 there is no lower bound, because a ratio is positive.

    Example with two tokens of probability 0.5 and advantage 1. The weight of the first, 6, is clipped to 5, and so is
    its gradient. The weight of the second is not clipped:

    >>> logprobs = torch.tensor([0.5, 0.5]).log().requires_grad_()
    >>> clipped = cispo(logprobs, torch.tensor([6.0, 0.1]), torch.tensor([1.0, 1.0]), low=1.0, high=4.0)
    >>> clipped.high
    tensor([ True, False])
    >>> clipped.objective.sum().backward()
    >>> logprobs.grad
    tensor([5.0000, 0.1000])
    """
    weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return Clipped(
        objective=weight * advantage * logprobs,
        low=ratio < 1.0 - low,
        high=ratio > 1.0 + high,
        dual=torch.zeros_like(ratio, dtype=torch.bool),
    )


def dual_clip(clipped: Clipped, ratio: Tensor, advantage: Tensor, bound: float) -> Clipped:
    """max(objective, bound x A) where A < 0, for a bound c > 1 (Ye et al., arXiv 1912.09729).

    Without the dual clip, the loss of a token with a negative advantage grows with its ratio without limit.

    Example with c = 3. The first token would contribute 4 x (-2) = -8 and is limited to 3 x (-2) = -6. The ratio of the
    second is below the bound. The third has a positive advantage, so the upper clip limits it (1.28 x 2):

    >>> ratio, advantage = torch.tensor([4.0, 2.9, 4.0]), torch.tensor([-2.0, -2.0, 2.0])
    >>> clipped = dual_clip(clip_higher(torch.zeros(3), ratio, advantage, 0.2, 0.28), ratio, advantage, bound=3.0)
    >>> clipped.objective
    tensor([-6.0000, -5.8000,  2.5600])
    >>> clipped.dual
    tensor([ True, False, False])
    """
    binds = (advantage < 0) & (ratio > bound)
    return replace(clipped, objective=torch.where(binds, bound * advantage, clipped.objective), dual=binds)


CLIPPINGS: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Clipped]] = {
    "clip_higher": clip_higher,
    "symmetric": symmetric,
    "cispo": cispo,
}
"""The entries by `algorithm.clipping`. Arguments: log-probs [N] (nats), ratio [N], advantage [N], clip_low, clip_high.
The ratio is the one that `algorithm.ratio` names."""
