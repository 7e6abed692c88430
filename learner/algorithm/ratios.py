"""Owns the log-ratio of the log-probs of two policies, kept finite, and its distribution as an additive histogram.

Must not know which policies are compared, or why.
"""

from __future__ import annotations

import math

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
