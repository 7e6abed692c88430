"""Owns how token losses become one number: a weight per token and one normaliser for the whole mini-batch.

Must not see tensors: both follow from token counts alone, so every rank computes the same numbers and the loss,
sum(weight x token loss) / normaliser, is the same whatever the micro-batches or the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleSize:
    """What a reduction needs of one sample: its group, its response tokens, whether its loss is masked."""

    group: str
    tokens: int
    masked: bool = False

    @property
    def counted(self) -> bool:
        """Whether it takes part; a masked sample leaves the sum and the count."""
        return not self.masked and self.tokens > 0


@dataclass(frozen=True)
class Reduction:
    """`weights[i]` applies to every token of sample i; `normaliser` divides the mini-batch's weighted sum.

    The normaliser is 0 when no sample counts: then there is nothing to learn from.
    """

    weights: tuple[float, ...]
    normaliser: float


def token(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Mean over all tokens of the mini-batch (the published DAPO code's `token-mean`, made global)."""
    weights = tuple(1.0 if one.counted else 0.0 for one in samples)
    return Reduction(weights, float(sum(one.tokens for one in samples if one.counted)))


def group_token(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Token mean inside each group, then mean over groups (DAPO Eq. 8 to the letter)."""
    tokens: Counter[str] = Counter()
    for one in samples:
        if one.counted:
            tokens[one.group] += one.tokens
    weights = tuple(1.0 / tokens[one.group] if one.counted else 0.0 for one in samples)
    return Reduction(weights, float(len(tokens)))


def sample(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Token mean inside each sample, then mean over samples (GRPO, arXiv 2402.03300 Eq. 3)."""
    weights = tuple(1.0 / one.tokens if one.counted else 0.0 for one in samples)
    return Reduction(weights, float(sum(one.counted for one in samples)))


def sequence_sum(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Sum over each sample's tokens, then mean over samples (verl's `seq-mean-token-sum`)."""
    weights = tuple(1.0 if one.counted else 0.0 for one in samples)
    return Reduction(weights, float(sum(one.counted for one in samples)))


def constant_length(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Each sample's sum over tokens / `longest`, then mean over samples (Dr. GRPO, arXiv 2503.20783)."""
    weights = tuple(1.0 if one.counted else 0.0 for one in samples)
    return Reduction(weights, float(longest * sum(one.counted for one in samples)))


REDUCTIONS: dict[str, Callable[[Sequence[SampleSize], int], Reduction]] = {
    "token": token,
    "group_token": group_token,
    "sample": sample,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
}
"""By algorithm.reduction: (samples of the mini-batch, `longest` in tokens, which constant_length reads)."""
