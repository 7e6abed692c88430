"""Owns the composition of the token loss: correction x clipped objective, KL and entropy terms, weighted and summed.

Must not divide by anything local: weights already carry the mini-batch's global normaliser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithm.clipping import CLIPPINGS, Clipped, dual_clip
from learner.algorithm.corrections import Correction, WeightLimits, correct, effective_share
from learner.algorithm.kl import k3
from learner.algorithm.ratios import histogram, log_ratio, percentile

SUMS = (
    "tokens", "loss", "entropy", "probability", "clip_low", "clip_high", "dual_clip", "ratio", "mismatch_kl",
    "importance", "importance_squared", "weight", "weight_squared", "capped", "masked", "referenced", "kl_reference",
)  # fmt: skip
"""What is summed over tokens, micro-batches and ranks, in this order; means are taken once at the end."""

HISTOGRAMS = ("importance", "ratio")
"""Whose log-ratio each row of a TokenLoss's histograms counts."""

PERCENTILES = (1, 50, 99)


@dataclass(frozen=True)
class LossSettings:
    """Which table entries apply, and their numbers; see algorithm. `correction` is never `auto`."""

    clipping: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: str
    correction_cap: float
    icepop_low: float
    icepop_high: float
    kl_coefficient: float
    entropy_coefficient: float


@dataclass(frozen=True)
class TokenData:
    """What each trained token brings along: floats [N] in the log-probs' dtype, and `sample` int64 [N].

    behaviour: the log-prob (nats) it was sampled with. advantage: per token, so that values which vary inside a
    response (PPO with GAE) need no other loss; group-relative estimators repeat the response's. weight: the reduction's
    over its normaliser; 0 marks a filler, which counts nowhere. sample: which response of this micro-batch it belongs
    to, from 0; a response is never split over micro-batches.
    """

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    sample: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """`loss`: the scalar to differentiate; `sums`: float64 [len(SUMS)]; `histograms`: int64 [len(HISTOGRAMS), BINS].

    The latter two are on the CPU, without gradient, and add up over micro-batches and ranks.
    """

    loss: Tensor
    sums: Tensor
    histograms: Tensor


def token_loss(
    logprobs: Tensor, entropy: Tensor, proximal: Tensor, data: TokenData, settings: LossSettings,
    reference: Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """-sum(weight x (correction x clipped objective - kl_coefficient x k3 + entropy_coefficient x entropy)).

    The objective is that of the ratio r = exp(logprobs - proximal) (DAPO Eq. 8, with the decoupled ratio). logprobs,
    entropy, proximal, reference: [N], nats, all float32 or all float64, and so is the loss. Gradient flows through
    `logprobs`, and through `entropy` only with an entropy coefficient. `reference` holds the reference policy's
    log-probs, wanted exactly when kl_coefficient > 0; ValueError otherwise.
    """
    if (reference is not None) != (settings.kl_coefficient > 0):
        given = "none" if reference is None else "some"
        raise ValueError(f"reference log-probs: {given} given with kl_coefficient = {settings.kl_coefficient}")
    gap = log_ratio(logprobs, proximal)
    ratio = torch.exp(gap)
    clipped = CLIPPINGS[settings.clipping](ratio, data.advantage, settings.clip_low, settings.clip_high)
    if settings.dual_clip is not None:
        clipped = dual_clip(clipped, ratio, data.advantage, settings.dual_clip)
    bounds = WeightLimits(settings.correction_cap, settings.icepop_low, settings.icepop_high)
    correction = correct(settings.correction, proximal, data.behaviour, data.sample, bounds)
    gain = correction.weighted.weight * clipped.objective
    divergence = None if reference is None else k3(logprobs, reference)
    if divergence is not None:
        gain = gain - settings.kl_coefficient * divergence
    if settings.entropy_coefficient:
        gain = gain + settings.entropy_coefficient * entropy
    loss = -(data.weight * gain).sum()
    with torch.no_grad():
        real = data.weight > 0
        columns = _columns(logprobs, entropy, ratio, clipped, correction, divergence)
        sums = torch.stack([column.detach().double() for column in columns])[:, real].sum(1).cpu()
        sums[SUMS.index("loss")] = float(loss.detach())
        return TokenLoss(loss, sums, torch.stack([histogram(correction.log_importance[real]), histogram(gap[real])]))


def _columns(
    logprobs: Tensor, entropy: Tensor, ratio: Tensor, clipped: Clipped, correction: Correction,
    divergence: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What SUMS sums, per token; the loss, which is one number already, stands as zeros."""
    one = torch.ones_like(ratio)
    none = torch.zeros_like(ratio)
    weight, capped, masked = correction.weighted
    referenced = (none, none) if divergence is None else (one, divergence)
    return (
        one, none, entropy, torch.exp(logprobs), clipped.low, clipped.high, clipped.dual, ratio, correction.mismatch_kl,
        correction.importance, correction.importance.square(), weight, weight.square(), capped, masked, *referenced,
    )  # fmt: skip


def means(sums: Tensor, histograms: Tensor) -> dict[str, float]:
    """The metrics that follow from TokenLoss's sums and histograms over a whole rollout step; `loss` is the caller's.

    Shares are of trained tokens. Percentiles are of importance (proximal over behaviour) and of the clipped ratio.
    effective_sample_size is that of the raw importance, weight_effective_sample_size of the weights in force.
    kl_reference is there only if a reference was.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    found = {
        "entropy": total["entropy"] / tokens,
        "mean_token_probability": total["probability"] / tokens,
        "clip_low_share": total["clip_low"] / tokens,
        "clip_high_share": total["clip_high"] / tokens,
        "dual_clip_share": total["dual_clip"] / tokens,
        "ratio_mean": total["ratio"] / tokens,
        "mismatch_kl": total["mismatch_kl"] / tokens,
        "effective_sample_size": effective_share(total["importance"], total["importance_squared"], total["tokens"]),
        "weight_effective_sample_size": effective_share(total["weight"], total["weight_squared"], total["tokens"]),
        "capped_share": total["capped"] / tokens,
        "masked_share": total["masked"] / tokens,
        "trained_tokens": total["tokens"],
    }
    if total["referenced"]:
        found["kl_reference"] = total["kl_reference"] / total["referenced"]
    for name, counts in zip(HISTOGRAMS, histograms, strict=True):
        found |= {f"{name}_p{one}": math.exp(percentile(counts, one / 100)) for one in PERCENTILES}
    return found
