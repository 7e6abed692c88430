"""Owns the log-ratio of two policies' log-probs, kept finite, and its distribution as a histogram that adds up.

Must not know which policies are compared, or why.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_GAP = 20.0
"""Nats beyond which log-ratios are cut, so that one odd token makes no metric infinite; far above any cap."""

SCALE = 1e-3
"""Nats. Bins are even in asinh(log-ratio / SCALE): alike below SCALE, in proportion to the log-ratio above."""

BINS = 513
"""Odd, so that one bin is centred on a log-ratio of 0."""

_REACH = math.asinh(LARGEST_GAP / SCALE)
_WIDTH = 2 * _REACH / BINS


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator, cut to +-LARGEST_GAP nats; log-probs [N] in, [N] out, without gradient where cut."""
    return (numerator - denominator).clamp(-LARGEST_GAP, LARGEST_GAP)


def histogram(log_ratios: Tensor) -> Tensor:
    """How many of `log_ratios` ([N], nats, no NaN) fall into each bin: int64 [BINS] on the CPU.

    Histograms of parts sum to that of the whole, so percentiles need no tokens from other ranks.
    """
    scaled = torch.asinh(log_ratios.detach().double() / SCALE)
    index = ((scaled + _REACH) / _WIDTH).long().clamp(0, BINS - 1)
    return torch.bincount(index, minlength=BINS).cpu()


def percentile(counts: Tensor, share: float) -> float:
    """The log-ratio (nats) at or below which `share` (0 to 1] of the counted tokens lie; 0 where nothing was counted.

    The middle of the bin that holds the nearest rank. Off by at most half a bin: 2.1e-5 nats around 0, and
    2.1 % of a log-ratio well above SCALE; what is exactly 0 stays 0.
    """
    total = int(counts.sum())
    if not total:
        return 0.0
    rank = max(1, math.ceil(share * total))
    index = int((counts.cumsum(0) < rank).sum())
    return SCALE * math.sinh((index - BINS // 2) * _WIDTH)
