"""Owns the log-ratio of two policies, of a token or of a response, kept finite, and its distribution as a histogram.

Must not know which policies are compared, or why.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LARGEST_GAP = 20.0
"""Nats. Log-ratios are clamped to this size, so that no outlier makes a metric infinite. Far above any cap."""

SCALE = 1e-3
"""Nats. The bins are even in asinh(log-ratio / SCALE): of equal width below SCALE, proportional to the log-ratio above
it."""

BINS = 513
"""Odd, so that one bin is centred on a log-ratio of 0."""

_REACH = math.asinh(LARGEST_GAP / SCALE)
_WIDTH = 2 * _REACH / BINS


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator, clamped to +-LARGEST_GAP nats. Log-probs [N] in, [N] out; no gradient where clamped."""
    return (numerator - denominator).clamp(-LARGEST_GAP, LARGEST_GAP)


def response_sums(values: Tensor, sample: Tensor) -> Tensor:
    """The sum of the `values` [N] over the tokens of each response: float64 [responses].

    sample: int64 [N], the response of each token, counted from 0, as in TokenData.
    In float64, so that the order in which a GPU sums a long response has no visible effect.

    >>> response_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 4.0]
    """
    sums = torch.zeros(int(sample.max()) + 1, dtype=torch.float64, device=values.device)
    return sums.index_add(0, sample, values.double())


def token(logprobs: Tensor, proximal: Tensor, sample: Tensor) -> Tensor:
    """log r = log pi(y_t) - log pi_old(y_t), for each token on its own (PPO, arXiv 1707.06347; GRPO; DAPO)."""
    return log_ratio(logprobs, proximal)


def sequence(logprobs: Tensor, proximal: Tensor, sample: Tensor) -> Tensor:
    """log s = the mean of log pi(y_t) - log pi_old(y_t) over a response of |y| tokens, repeated for each of them.

    s = (pi(y) / pi_old(y))^(1/|y|) is the ratio of the whole response, normalised by its length (GSPO, arXiv 2507.18071
    Eq. 7). The gradient of s is s times the mean gradient of the log-probs (Eq. 10), so it reaches every token.

    Example: the ratios of the first response are 2 and 1/2, so s = 1. Those of the second are 4 and 1, so s = 2:

    >>> logprobs, proximal = torch.tensor([0.4, 0.2, 0.4, 0.5]).log(), torch.tensor([0.2, 0.4, 0.1, 0.5]).log()
    >>> torch.exp(sequence(logprobs, proximal, torch.tensor([0, 0, 1, 1])))
    tensor([1., 1., 2., 2.])
    """
    tokens = response_sums(torch.ones_like(logprobs), sample)
    means = response_sums(logprobs - proximal, sample) / tokens
    return means.clamp(-LARGEST_GAP, LARGEST_GAP).index_select(0, sample).to(logprobs.dtype)


def sequence_token(logprobs: Tensor, proximal: Tensor, sample: Tensor) -> Tensor:
    """log s as in `sequence`, with the gradient of the token's own log-prob (GSPO-token, arXiv 2507.18071 Eq. 14).

    s_t = sg(s) pi(y_t) / sg(pi(y_t)), where sg stops the gradient. If advantage and weight are the same for all tokens
    of a response, the gradient of the loss is that of `sequence`. If they differ, each token is driven by its own.

    >>> logprobs, proximal = torch.tensor([0.4, 0.2, 0.4, 0.5]).log(), torch.tensor([0.2, 0.4, 0.1, 0.5]).log()
    >>> torch.exp(sequence_token(logprobs, proximal, torch.tensor([0, 0, 1, 1])))
    tensor([1., 1., 2., 2.])
    """
    return sequence(logprobs, proximal, sample).detach() + (logprobs - logprobs.detach())


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": token,
    "sequence": sequence,
    "sequence_token": sequence_token,
}
"""The entries by `algorithm.ratio`. Arguments: log-probs [N] and proximal log-probs [N] in nats; sample [N], the
response of each token, as in TokenData. The result is the log-ratio [N] whose exponential is clipped."""


def histogram(log_ratios: Tensor) -> Tensor:
    """Count the `log_ratios` ([N], nats, no NaN) in each bin: int64 [BINS] on the CPU.

    The histograms of parts add up to the histogram of the whole, so percentiles need no tokens from other ranks.

    Example: three log-ratios of 0 fall into the middle bin (index 256), 1 nat falls into bin 440:

    >>> counts = histogram(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    >>> counts.nonzero().flatten().tolist(), counts[counts > 0].tolist()
    ([256, 440], [3, 1])
    """
    scaled = torch.asinh(log_ratios.detach().double() / SCALE)
    index = ((scaled + _REACH) / _WIDTH).long().clamp(0, BINS - 1)
    return torch.bincount(index, minlength=BINS).cpu()


def percentile(counts: Tensor, share: float) -> float:
    """The log-ratio (nats) at or below which a `share` (0 to 1] of the counted tokens lies; 0 if no token was counted.

    The result is the middle of the bin that contains the nearest rank. It is off by at most half a bin: 2.1e-5 nats
    around 0, and 2.1 % of a log-ratio well above SCALE. A log-ratio of exactly 0 stays 0.

    Example: of 0, 0, 0 and 1 nat, three quarters are at most 0, and the largest is found within 2.1 %:

    >>> counts = histogram(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    >>> percentile(counts, 0.75)
    0.0
    >>> round(percentile(counts, 1.0), 3)
    1.001
    """
    total = int(counts.sum())
    if not total:
        return 0.0
    rank = max(1, math.ceil(share * total))
    index = int((counts.cumsum(0) < rank).sum())
    return SCALE * math.sinh((index - BINS // 2) * _WIDTH)
