"""The clipped surrogate for both signs of the advantage on both sides of the ratio; test_cispo.py has CISPO's."""

from __future__ import annotations

import math

import pytest
import torch

from learner.algorithm.clipping import CLIPPINGS, dual_clip
from learner.algorithm.loss import LossSettings, TokenData, token_loss

FORMULAS = {
    "clip_higher": "min(r A, clip(r, 1 - e_low, 1 + e_high) A) (DAPO Eq. 10)",
    "symmetric": "min(r A, clip(r, 1 - e, 1 + e) A) (PPO Eq. 7, GRPO)",
}
CLIPPED = [
    pytest.param(name, marks=pytest.mark.conformance(formula=FORMULAS[name], setting=f"clipping = {name}"))
    for name in FORMULAS
]
UPPER = {"clip_higher": 1.28, "symmetric": 1.2}


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "slope"),
    [
        (1.5, 2.0, False, True, 0.0),  # more likely, positive advantage: clipped at the upper bound
        (0.5, 2.0, False, False, 2.0),  # less likely, positive advantage: may rise again
        (0.5, -2.0, True, False, 0.0),  # less likely, negative advantage: clipped at the lower bound
        (1.5, -2.0, False, False, -2.0),  # more likely, negative advantage: not bounded
        (1.0, 2.0, False, False, 2.0),
        (1.1, -2.0, False, False, -2.0),
    ],
)
def test_four_corners(name: str, ratio: float, advantage: float, low: bool, high: bool, slope: float) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    found = CLIPPINGS[name](torch.zeros(1), ratios, torch.tensor([advantage]), 0.2, 0.28)
    objective = {1.5: UPPER[name], 0.5: 0.8}[ratio] * advantage if low or high else ratio * advantage
    assert found.objective.item() == pytest.approx(objective)
    assert (found.low.item(), found.high.item(), found.dual.item()) == (low, high, False)
    found.objective.sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.item() == pytest.approx(slope)


@pytest.mark.conformance(formula="the rise of 0.01 ends at 0.0128, not 0.012 (DAPO 3.1)", setting="clip_high = 0.28")
@pytest.mark.parametrize(("name", "high", "limit"), [("clip_higher", 0.28, 0.0128), ("symmetric", 0.2, 0.012)])
def test_how_far_an_unlikely_token_may_rise(name: str, high: float, limit: float) -> None:
    """A token of probability 0.01 has a gradient up to the bound (0.0128 or 0.012) and none beyond it."""
    settings = LossSettings(name, 0.2, high, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0)
    slopes = []
    for probability in (limit - 1e-6, limit + 1e-6):
        proximal = torch.tensor([math.log(0.01)], dtype=torch.float64)
        logprobs = torch.tensor([math.log(probability)], dtype=torch.float64, requires_grad=True)
        ones = torch.ones(1, dtype=torch.float64)
        data = TokenData(proximal, ones, ones, torch.zeros(1, dtype=torch.int64))
        token_loss(logprobs, ones, proximal, data, settings).loss.backward()
        assert logprobs.grad is not None
        slopes.append(logprobs.grad.item())
    assert slopes == [pytest.approx(-limit / 0.01, rel=1e-3), 0.0]


@pytest.mark.conformance(formula="A < 0: max(min(r A, clip(r) A), c A) (Ye et al. 2019)", setting="dual_clip = 3")
@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope", "dual"),
    [
        (4.0, -2.0, -6.0, 0.0, True),  # -8 without the dual clip
        (2.9, -2.0, -5.8, -2.0, False),
        (0.5, -2.0, -1.6, 0.0, False),  # the dual clip does not affect the lower bound
        (4.0, 2.0, 2.56, 0.0, False),  # nor a positive advantage
    ],
)
def test_dual_clip(ratio: float, advantage: float, objective: float, slope: float, dual: bool) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    gained = torch.tensor([advantage])
    clipped = CLIPPINGS["clip_higher"](torch.zeros(1), ratios, gained, 0.2, 0.28)
    found = dual_clip(clipped, ratios, gained, 3.0)
    assert found.objective.item() == pytest.approx(objective)
    assert found.dual.item() is dual
    found.objective.sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.item() == pytest.approx(slope)


@pytest.mark.conformance(formula="A < 0: max(min(r A, clip(r) A), c A) (Ye et al. 2019)", setting="dual_clip = null")
@pytest.mark.parametrize(("bound", "expected"), [(None, 8.0), (3.0, 6.0)])
def test_dual_clip_is_off_unless_set(bound: float | None, expected: float) -> None:
    settings = LossSettings("clip_higher", 0.2, 0.28, bound, "none", 2.0, 0.5, 5.0, 0.0, 0.0)
    ones = torch.ones(1)
    data = TokenData(-ones, -2 * ones, ones, torch.zeros(1, dtype=torch.int64))
    found = token_loss(torch.tensor([math.log(4.0)]) - 1, ones, -ones, data, settings)
    assert found.loss.item() == pytest.approx(expected)
