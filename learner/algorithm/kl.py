"""Owns the per-token estimator of the KL divergence between two policies.

Must not weigh or reduce it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.ratios import log_ratio


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 >= 0 with d = reference - logprobs, all [N], nats: an estimate of KL(policy || reference).

    Unbiased for tokens drawn from the policy (Schulman's k3; GRPO, arXiv 2402.03300 Eq. 4). In the dtype of
    `logprobs`, with gradient to them, 1 - exp(d); none where d is cut to +-LARGEST_GAP.
    """
    # In float64: exp(d) - 1 - d of a tiny d is lost in float32, even its sign.
    difference = log_ratio(reference, logprobs).double()
    return (torch.expm1(difference) - difference).to(logprobs.dtype)
