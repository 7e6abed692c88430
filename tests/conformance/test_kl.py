"""The k3 estimator of the KL divergence to the reference policy."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm.kl import k3

k3_conformance = pytest.mark.conformance(
    formula="KL(pi || ref) ~ ref / pi - log(ref / pi) - 1 (GRPO Eq. 4)", setting="kl_coefficient"
)


@k3_conformance
def test_by_hand() -> None:
    logprobs = torch.tensor([0.5, 0.25, 0.3]).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5, 0.3]).log()
    found = k3(logprobs, reference)
    # 0.5 - ln 0.5 - 1; 2 - ln 2 - 1; 0
    assert found.tolist() == pytest.approx([0.193147, 0.306853, 0.0], abs=1e-6)
    found.sum().backward()
    assert logprobs.grad is not None
    # 1 - ref / pi: down where the policy is likelier than the reference, up where it is less likely
    assert logprobs.grad.tolist() == pytest.approx([0.5, -1.0, 0.0], abs=1e-6)


@k3_conformance
def test_the_mean_of_k3_under_the_policy_is_the_divergence() -> None:
    """All three outcomes are summed. The reverse divergence would be 0.6758."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    # 0.7 ln 3.5 + 0.2 ln (2/3) + 0.1 ln 0.2 = 0.876934 - 0.081093 - 0.160944
    assert float((policy * k3(policy.log(), reference.log())).sum()) == pytest.approx(0.634897, abs=1e-6)


@k3_conformance
def test_a_tiny_difference_is_not_lost_in_float32() -> None:
    """The exact value at d = 1e-6 is d^2 / 2. In float32, (exp(d) - 1) - d is off by a tenth, or 0."""
    found = k3(torch.tensor([0.0]), torch.tensor([1e-6]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(5e-13, rel=1e-4, abs=0.0)
