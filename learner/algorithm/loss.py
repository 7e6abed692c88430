"""Owns the loss of tokens: corrected and clipped objective, KL term and entropy term, weighted and summed.

Must not divide by anything local: the weights already contain the global normaliser of the mini-batch.

Worked example of `token_loss`: one response of two tokens with advantage 1, and weights of 1/2 (their mean).

- Token 1: probability 0.45 now, 0.3 under the proximal and 0.1 under the behaviour policy. The ratio 1.5 is clipped
  to 1.28; the importance 0.3 / 0.1 = 3 is capped at 2. It contributes 2 x 1.28 = 2.56 and no gradient.
- Token 2: probability 0.1 now, 0.2 under the proximal and 0.4 under the behaviour policy. The ratio is 0.5, the
  importance 0.5. It contributes 0.25, and its gradient is -(1/2) x 0.5 x 0.5 = -0.125.

The loss is -(2.56 + 0.25) / 2 = -1.405:

>>> settings = LossSettings(
...     clipping="clip_higher",
...     clip_low=0.2,
...     clip_high=0.28,
...     dual_clip=None,
...     correction="truncated_is",
...     correction_cap=2.0,
...     icepop_low=0.5,
...     icepop_high=5.0,
...     kl_coefficient=0.0,
...     entropy_coefficient=0.0,
... )
>>> logprobs = torch.tensor([0.45, 0.1]).log().requires_grad_()
>>> data = TokenData(
...     behaviour=torch.tensor([0.1, 0.4]).log(),
...     advantage=torch.tensor([1.0, 1.0]),
...     weight=torch.tensor([0.5, 0.5]),
...     sample=torch.tensor([0, 0]),
... )
>>> found = token_loss(logprobs, torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.2]).log(), data, settings)
>>> round(found.loss.item(), 4)
-1.405
>>> found.loss.backward()
>>> logprobs.grad
tensor([ 0.0000, -0.1250])

With an entropy coefficient of 0.1 and the entropies 1 and 2, the loss falls by 0.1 x (1 + 2) / 2 = 0.15. With a KL
coefficient of 0.1 and a reference that gives the tokens probability 0.9 and 0.1, token 1 is off by a factor of 2
(k3 = 2 - ln 2 - 1 = 0.3069) and token 2 not at all, so the loss rises by 0.1 x 0.3069 / 2 = 0.0153:

>>> from dataclasses import replace
>>> more = replace(settings, entropy_coefficient=0.1, kl_coefficient=0.1)
>>> reference = torch.tensor([0.9, 0.1]).log()
>>> found = token_loss(logprobs, torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.2]).log(), data, more, reference)
>>> round(found.loss.item(), 4)
-1.5397
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithm.clipping import CLIPPINGS, Clipped, dual_clip
from learner.algorithm.corrections import Correction, WeightLimits, correct, effective_share
from learner.algorithm.kl import k3
from learner.algorithm.ratios import RATIOS, histogram, percentile
from learner.algorithm.values import ValueLoss, ValueTerm, value_loss

SUMS = (
    "tokens",
    "loss",
    "entropy",
    "probability",
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio",
    "mismatch_kl",
    "importance",
    "importance_squared",
    "weight",
    "weight_squared",
    "capped",
    "masked",
    "referenced",
    "kl_reference",
    "valued",
    "value_error_squared",
    "value_clipped",
    "return",
    "return_squared",
)
"""The quantities that are summed over tokens, micro-batches and ranks, in this order. Means are taken once, at the
end."""

HISTOGRAMS = ("importance", "ratio")
"""The log-ratios that the rows of `TokenLoss.histograms` count, in this order."""

PERCENTILES = (1, 50, 99)


@dataclass(frozen=True)
class LossSettings:
    """The entries of CLIPPINGS, CORRECTIONS and RATIOS to apply, and their numbers. `correction` is never `auto`.

    Names and meanings are those of the `algorithm` section of a recipe; `value_coefficient` is 0 without a value head.
    """

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
    ratio: str = "token"
    value_clip: float = 0.2
    value_coefficient: float = 0.0


@dataclass(frozen=True)
class TokenData:
    """The inputs of each trained token: floats [N] in the dtype of the log-probs, and `sample` int64 [N].

    behaviour: the log-prob (nats) with which the token was sampled.
    advantage: one value per token. Group-relative estimators repeat that of the response; GAE's vary within it, which
    the ratio `sequence` would not keep apart.
    weight: the weight of the reduction divided by its normaliser. 0 marks a filler, which counts nowhere.
    sample: the response of this micro-batch to which the token belongs, counted from 0. A response is never split over
    micro-batches.
    """

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    sample: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a micro-batch and its statistics.

    loss: the scalar to differentiate. sums: float64 [len(SUMS)]. histograms: int64 [len(HISTOGRAMS), BINS].
    Sums and histograms are on the CPU, without gradient, and add up over micro-batches and ranks.
    """

    loss: Tensor
    sums: Tensor
    histograms: Tensor


def token_loss(
    logprobs: Tensor,
    entropy: Tensor,
    proximal: Tensor,
    data: TokenData,
    settings: LossSettings,
    reference: Tensor | None = None,
    value: ValueTerm | None = None,
) -> TokenLoss:
    """-sum(weight x (correction x clipped objective - kl_coefficient x k3 + entropy_coefficient x entropy)).

    With `value`, value_coefficient x `value_loss` is added (PPO, arXiv 1707.06347 Eq. 9). The objective is that of
    r = exp(logprobs - proximal) (DAPO Eq. 8, with the decoupled ratio), or of the ratio that `settings.ratio` names.
    logprobs, entropy, proximal, reference: [N], nats, all float32 or all float64; the loss has the same dtype. Gradient
    flows through `logprobs`, and through `entropy` only with an entropy coefficient. `reference` holds the log-probs of
    the reference policy. Raises ValueError unless it is given exactly when kl_coefficient > 0. The docstring of this
    module has a worked example.
    """
    if (reference is not None) != (settings.kl_coefficient > 0):
        given = "None" if reference is None else "a tensor"
        raise ValueError(
            f"reference: {given} is not valid with kl_coefficient = {settings.kl_coefficient}: "
            "expected log-probs exactly when kl_coefficient > 0"
        )
    gap = RATIOS[settings.ratio](logprobs, proximal, data.sample)
    ratio = torch.exp(gap)
    clipped = CLIPPINGS[settings.clipping](logprobs, ratio, data.advantage, settings.clip_low, settings.clip_high)
    if settings.dual_clip is not None:
        clipped = dual_clip(clipped, ratio, data.advantage, settings.dual_clip)
    limits = WeightLimits(settings.correction_cap, settings.icepop_low, settings.icepop_high)
    correction = correct(settings.correction, proximal, data.behaviour, data.sample, limits)
    gain = correction.weighted.weight * clipped.objective
    divergence = None if reference is None else k3(logprobs, reference)
    if divergence is not None:
        gain = gain - settings.kl_coefficient * divergence
    if settings.entropy_coefficient:
        gain = gain + settings.entropy_coefficient * entropy
    loss = -(data.weight * gain).sum()
    valued = None if value is None else value_loss(value, data.weight, settings.value_clip)
    if valued is not None:
        loss = loss + settings.value_coefficient * valued.loss
    with torch.no_grad():
        real = data.weight > 0
        columns = (
            *_columns(logprobs, entropy, ratio, clipped, correction, divergence),
            *_value_columns(ratio, value, valued),
        )
        sums = torch.stack([column.detach().double() for column in columns])[:, real].sum(1).cpu()
        sums[SUMS.index("loss")] = float(loss.detach())
        return TokenLoss(loss, sums, torch.stack([histogram(correction.log_importance[real]), histogram(gap[real])]))


def _columns(
    logprobs: Tensor,
    entropy: Tensor,
    ratio: Tensor,
    clipped: Clipped,
    correction: Correction,
    divergence: Tensor | None,
) -> tuple[Tensor, ...]:
    """The quantities of SUMS per token, [N] each. The loss is one number already, so its column is zeros."""
    ones, zeros = torch.ones_like(ratio), torch.zeros_like(ratio)
    weight, capped, masked = correction.weighted
    referenced = (zeros, zeros) if divergence is None else (ones, divergence)
    return (
        *(ones, zeros, entropy, torch.exp(logprobs)),
        *(clipped.low, clipped.high, clipped.dual, ratio),
        *(correction.mismatch_kl, correction.importance, correction.importance.square()),
        *(weight, weight.square(), capped, masked),
        *referenced,
    )


def _value_columns(like: Tensor, value: ValueTerm | None, valued: ValueLoss | None) -> tuple[Tensor, ...]:
    """The last five quantities of SUMS per token, [N] each: zeros shaped like `like` without a value head."""
    if value is None or valued is None:
        return (torch.zeros_like(like),) * 5
    error = value.values - value.returns
    return torch.ones_like(like), error.square(), valued.clipped, value.returns, value.returns.square()


def means(sums: Tensor, histograms: Tensor) -> dict[str, float]:
    """The metrics of a whole rollout step, from the added sums and histograms of TokenLoss. The caller adds `loss`.

    Shares are shares of the trained tokens. Percentiles are those of the importance (proximal / behaviour) and of the
    ratio that is clipped. effective_sample_size is that of the uncorrected importance, weight_effective_sample_size
    that of the weights that were applied. kl_reference is present only if a reference was given, the metrics of values
    only with a value head.
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
    if total["valued"]:
        found |= _value_means(total)
    for name, counts in zip(HISTOGRAMS, histograms, strict=True):
        found |= {f"{name}_p{rank}": math.exp(percentile(counts, rank / 100)) for rank in PERCENTILES}
    return found


def _value_means(total: dict[str, float]) -> dict[str, float]:
    """value_explained_variance: 1 - the mean squared error of the values / the variance of the returns; at most 1."""
    tokens = total["valued"]
    error, mean = total["value_error_squared"] / tokens, total["return"] / tokens
    variance = total["return_squared"] / tokens - mean * mean
    explained = {"value_explained_variance": 1.0 - error / variance} if variance > 0 else {}
    clipped = total["value_clipped"] / tokens
    return {"value_loss": error / 2, "value_clip_share": clipped, "return_mean": mean} | explained
