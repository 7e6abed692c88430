"""Owns the composition of DAPO's token loss: correction x clipped objective, weighted and summed.

Must not divide by anything local: weights already carry the mini-batch's global normaliser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.corrections import CORRECTIONS, LARGEST_GAP, effective_share

SUMS = (
    "tokens", "loss", "entropy", "probability", "clip_low", "clip_high", "ratio", "mismatch_kl", "importance",
    "importance_squared", "capped",
)  # fmt: skip
"""What is summed over tokens, micro-batches and ranks, in this order; means are taken once at the end."""


@dataclass(frozen=True)
class LossSettings:
    """Which table entries apply, and their numbers; see settings.Algorithm."""

    preset: str
    clip_low: float
    clip_high: float
    correction: str
    correction_cap: float


@dataclass(frozen=True)
class TokenData:
    """What each trained token brings along, all [N] float32.

    weight is the reduction's weight over its normaliser; 0 marks a filler, which counts nowhere.
    """

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor


def token_loss(
    logprobs: Tensor, entropy: Tensor, proximal: Tensor, data: TokenData, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """-sum(weight x correction x min(r A, clip(r) A)), r = exp(logprobs - proximal); no KL, no entropy bonus.

    logprobs, entropy, proximal: [N] float32. Returns the scalar to differentiate, and the sums of SUMS as
    float64 [len(SUMS)]. Only `logprobs` carries gradient. (DAPO Eq. 8 with the decoupled ratio.)
    """
    ratio = torch.exp((logprobs - proximal).clamp(-LARGEST_GAP, LARGEST_GAP))
    clipped = CLIPPINGS[settings.preset](ratio, data.advantage, settings.clip_low, settings.clip_high)
    correction = CORRECTIONS[settings.correction](proximal, data.behaviour, settings.correction_cap)
    loss = -(data.weight * correction.weight * clipped.objective).sum()
    with torch.no_grad():
        real = data.weight > 0
        columns = (
            torch.ones_like(ratio), entropy, torch.exp(logprobs), clipped.low, clipped.high, ratio,
            correction.mismatch_kl, correction.importance, correction.importance.square(), correction.capped,
        )  # fmt: skip
        tokens, *others = (column[real].double().sum() for column in columns)
        return loss, torch.stack([tokens, loss.detach().double(), *others])


def means(sums: list[float]) -> dict[str, float]:
    """The metrics that follow from SUMS taken over a whole rollout step; `loss` is left to the caller."""
    total = dict(zip(SUMS, sums, strict=True))
    tokens = max(total["tokens"], 1.0)
    return {
        "entropy": total["entropy"] / tokens,
        "mean_token_probability": total["probability"] / tokens,
        "clip_low_share": total["clip_low"] / tokens,
        "clip_high_share": total["clip_high"] / tokens,
        "ratio_mean": total["ratio"] / tokens,
        "mismatch_kl": total["mismatch_kl"] / tokens,
        "effective_sample_size": effective_share(total["importance"], total["importance_squared"], total["tokens"]),
        "capped_share": total["capped"] / tokens,
        "trained_tokens": total["tokens"],
    }
