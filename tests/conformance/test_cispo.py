"""CISPO: the clipped importance weight without gradient, times A log pi (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.loss import LossSettings, TokenData, means, token_loss

CISPO = LossSettings("cispo", 1.0, 4.0, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0)
cispo = pytest.mark.conformance(
    formula="sg(clip(r, 1 - e_low, 1 + e_high)) A log pi (CISPO Eq. 4 and 5)", setting="clipping = cispo"
)


@cispo
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("ratio", "weight", "low", "high"),
    [(1.5, 1.28, False, True), (0.5, 0.8, True, False), (1.0, 1.0, False, False), (0.9, 0.9, False, False)],
)
def test_four_corners(ratio: float, advantage: float, weight: float, low: bool, high: bool) -> None:
    """Both bounds hold for both signs of the advantage, and no token loses its gradient."""
    logprobs = torch.tensor([math.log(0.3)], requires_grad=True)
    # The ratio has a gradient of its own, which must not count.
    found = CLIPPINGS["cispo"](logprobs, ratio / 0.3 * logprobs.exp(), torch.tensor([advantage]), 0.2, 0.28)
    assert found.objective.item() == pytest.approx(weight * advantage * math.log(0.3))
    assert (found.low.item(), found.high.item(), found.dual.item()) == (low, high, False)
    found.objective.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(weight * advantage)


@cispo
def test_by_hand() -> None:
    """Ratios 8 (clipped to 5), 0.1 (no lower bound) and 1; advantages 1, 1 and -2; the mean of three tokens."""
    proximal = torch.tensor([0.05, 0.5, 0.2], dtype=torch.float64).log()
    logprobs = (proximal + torch.tensor([8.0, 0.1, 1.0], dtype=torch.float64).log()).requires_grad_()
    ones = torch.ones(3, dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    data = TokenData(proximal, advantage, ones / 3, torch.zeros(3, dtype=torch.int64))
    found = token_loss(logprobs, ones, proximal, data, CISPO)
    assert found.loss.item() == pytest.approx(-(5 * math.log(0.4) + 0.1 * math.log(0.05) - 2 * math.log(0.2)) / 3)
    found.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-5 / 3, -0.1 / 3, 2 / 3])
    metrics = means(found.sums, found.histograms)
    assert metrics["clip_high_share"] == pytest.approx(1 / 3)
    assert (metrics["clip_low_share"], metrics["dual_clip_share"]) == (0.0, 0.0)


@cispo
def test_the_correction_multiplies_the_weight() -> None:
    """Importance 3, capped at 2, and a ratio of 1.1: the gradient is 2 x 1.1."""
    proximal = torch.tensor([0.3], dtype=torch.float64).log()
    logprobs = (proximal + math.log(1.1)).requires_grad_()
    ones = torch.ones(1, dtype=torch.float64)
    data = TokenData(proximal - math.log(3), ones, ones, torch.zeros(1, dtype=torch.int64))
    token_loss(logprobs, ones, proximal, data, replace(CISPO, correction="truncated_is")).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.2)


@cispo
@pytest.mark.parametrize("clipping", ["clip_higher", "symmetric"])
def test_on_policy_it_is_the_policy_gradient(clipping: str) -> None:
    """At ratio 1, where nothing is clipped, the gradient is that of the other clippings."""
    gradients = []
    for name in ("cispo", clipping):
        logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
        half = torch.full((2,), 0.5, dtype=torch.float64)
        advantage = torch.tensor([1.0, -3.0], dtype=torch.float64)
        data = TokenData(logprobs.detach(), advantage, half, torch.tensor([0, 0]))
        chosen = replace(CISPO, clipping=name, clip_low=0.2, clip_high=0.2)
        token_loss(logprobs, half, logprobs.detach(), data, chosen).loss.backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad.tolist())
    assert gradients[0] == pytest.approx(gradients[1])
