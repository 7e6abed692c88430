"""Owns how the losses of tokens become one number: one weight per token and one normaliser for the whole mini-batch.

Must not use tensors. Weights and normaliser follow from token counts alone, so every rank computes the same ones, and
the loss, sum(weight x token loss) / normaliser, does not depend on the micro-batches or the number of ranks.

The examples reduce the same three responses: two of group a, with 2 and 6 tokens, and one of group b, with 4 tokens.
Each token of the first has loss 3, of the second 1, of the third 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleSize:
    """What a reduction needs to know of a sample: its group, its response tokens, and whether its loss is masked."""

    group: str
    tokens: int
    masked: bool = False

    @property
    def counted(self) -> bool:
        """Whether the sample counts. A masked or empty one is in neither the sum nor the normaliser."""
        return not self.masked and self.tokens > 0


@dataclass(frozen=True)
class Reduction:
    """`weights[i]` applies to every token of sample i; `normaliser` divides the weighted sum of the mini-batch.

    The normaliser is 0 if no sample counts: then there is nothing to train on.
    """

    weights: tuple[float, ...]
    normaliser: float


def token(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Mean over all tokens of the mini-batch (`token-mean` of the published DAPO code, over all ranks).

    Example: (2 x 3 + 6 x 1 + 4 x 2) / 12 = 1.667.

    >>> token([SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 4)], longest=10)
    Reduction(weights=(1.0, 1.0, 1.0), normaliser=12.0)
    """
    weights = tuple(1.0 if response.counted else 0.0 for response in samples)
    return Reduction(weights, float(sum(response.tokens for response in samples if response.counted)))


def group_token(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Token mean within each group, then mean over groups (DAPO Eq. 8 as printed).

    Example: group a has (2 x 3 + 6 x 1) / 8 = 1.5, group b has 4 x 2 / 4 = 2, the mean of both is 1.75.

    >>> group_token([SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 4)], longest=10)
    Reduction(weights=(0.125, 0.125, 0.25), normaliser=2.0)
    """
    tokens: Counter[str] = Counter()
    for response in samples:
        if response.counted:
            tokens[response.group] += response.tokens
    weights = tuple(1.0 / tokens[response.group] if response.counted else 0.0 for response in samples)
    return Reduction(weights, float(len(tokens)))


def sample(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Token mean within each sample, then mean over samples (GRPO, arXiv 2402.03300 Eq. 3).

    Example: (3 + 1 + 2) / 3 = 2. The weights are 1/2, 1/6 and 1/4.

    >>> reduction = sample([SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 4)], longest=10)
    >>> [round(weight, 4) for weight in reduction.weights], reduction.normaliser
    ([0.5, 0.1667, 0.25], 3.0)
    """
    weights = tuple(1.0 / response.tokens if response.counted else 0.0 for response in samples)
    return Reduction(weights, float(sum(response.counted for response in samples)))


def sequence_sum(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Sum over the tokens of each sample, then mean over samples (`seq-mean-token-sum` of verl).

    Example: (2 x 3 + 6 x 1 + 4 x 2) / 3 = 6.667.

    >>> sequence_sum([SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 4)], longest=10)
    Reduction(weights=(1.0, 1.0, 1.0), normaliser=3.0)
    """
    weights = tuple(1.0 if response.counted else 0.0 for response in samples)
    return Reduction(weights, float(sum(response.counted for response in samples)))


def constant_length(samples: Sequence[SampleSize], longest: int) -> Reduction:
    """Sum over the tokens of each sample divided by `longest`, then mean over samples (Dr. GRPO, arXiv 2503.20783).

    Example: (6 / 10 + 6 / 10 + 8 / 10) / 3 = 0.667, which is a sum of 20 divided by 3 x 10.

    >>> constant_length([SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 4)], longest=10)
    Reduction(weights=(1.0, 1.0, 1.0), normaliser=30.0)
    """
    weights = tuple(1.0 if response.counted else 0.0 for response in samples)
    return Reduction(weights, float(longest * sum(response.counted for response in samples)))


REDUCTIONS: dict[str, Callable[[Sequence[SampleSize], int], Reduction]] = {
    "token": token,
    "group_token": group_token,
    "sample": sample,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
}
"""The entries by `algorithm.reduction`. Arguments: the samples of the mini-batch; `longest`, in tokens, which only
constant_length uses."""
