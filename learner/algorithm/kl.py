"""Owns the estimator of the KL divergence between two policies, per token.

Must not weight it or reduce it over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.ratios import log_ratio


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 >= 0 with d = reference - logprobs, all [N], nats: an estimate of KL(policy || reference).

    Unbiased for tokens that were sampled from the policy (Schulman's k3; GRPO, arXiv 2402.03300 Eq. 4). The result has
    the dtype of `logprobs`. Its gradient with respect to `logprobs` is 1 - exp(d), or 0 where d is clamped to
    +-LARGEST_GAP.

    Example: the policy gives two tokens probability 0.5 and 0.25, the reference gives them 0.25 and 0.5. The first
    estimate is 0.5 - ln 0.5 - 1 = 0.1931, the second 2 - ln 2 - 1 = 0.3069. With equal probabilities it is 0:

    >>> k3(torch.tensor([0.5, 0.25, 0.1]).log(), torch.tensor([0.25, 0.5, 0.1]).log())
    tensor([0.1931, 0.3069, 0.0000])
    """
    # In float64: for a tiny d, rounding to float32 destroys exp(d) - 1 - d, even its sign.
    difference = log_ratio(reference, logprobs).double()
    return (torch.expm1(difference) - difference).to(logprobs.dtype)
