"""Off-policy weights by hand and against float64 numpy, and the metrics that show their effect."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.algorithm.corrections import CORRECTIONS, WeightLimits, correct, effective_share
from learner.algorithm.loss import LossSettings, TokenData, means, token_loss
from learner.algorithm.ratios import BINS, histogram, percentile

FORMULAS = {
    "none": "w = 1",
    "importance": "w = pi_prox / pi_behav (decoupled PPO)",
    "truncated_is": "w = min(pi_prox / pi_behav, C)",
    "truncated_is_sequence": "w = min(prod_t pi_prox / pi_behav, C)",
    "icepop": "w = k if low <= k <= high, else 0; k = pi_prox / pi_behav (IcePop)",
}


def conformance(name: str) -> pytest.MarkDecorator:
    return pytest.mark.conformance(formula=FORMULAS[name], setting=f"correction = {name}")


CORRECTED = [pytest.param(name, marks=conformance(name)) for name in CORRECTIONS]
BOUNDS = WeightLimits(cap=2.0, low=0.5, high=5.0)
# Two responses: importance 2, 3 and 0.4, 0.5, 6.
IMPORTANCE = [2.0, 3.0, 0.4, 0.5, 6.0]
SAMPLE = torch.tensor([0, 0, 1, 1, 1])
NO, YES = False, True
BY_HAND: dict[str, tuple[list[float], list[bool], list[bool]]] = {
    "none": ([1.0] * 5, [NO] * 5, [NO] * 5),
    "importance": (IMPORTANCE, [NO] * 5, [NO] * 5),
    "truncated_is": ([2.0, 2.0, 0.4, 0.5, 2.0], [NO, YES, NO, NO, YES], [NO] * 5),
    "truncated_is_sequence": ([2.0, 2.0, 1.2, 1.2, 1.2], [YES, YES, NO, NO, NO], [NO] * 5),  # products 6 and 1.2
    "icepop": ([2.0, 3.0, 0.0, 0.5, 0.0], [NO] * 5, [NO, NO, YES, NO, YES]),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_weights_by_hand(name: str) -> None:
    behaviour = torch.tensor([-9.0, -8.0, -7.5, -9.25, -9.0], dtype=torch.float64)
    # Slightly inside the limits at 2 and 0.5, so that rounding does not decide.
    gap = torch.tensor(IMPORTANCE, dtype=torch.float64).log() + torch.tensor(
        [-1e-9, 0, 0, 1e-9, 0], dtype=torch.float64
    )
    proximal = (behaviour + gap).requires_grad_()
    found = correct(name, proximal, behaviour, SAMPLE, BOUNDS)
    weight, capped, masked = BY_HAND[name]
    assert found.weighted.weight.tolist() == pytest.approx(weight)
    assert found.weighted.capped.tolist() == capped
    assert found.weighted.masked.tolist() == masked
    assert found.importance.tolist() == pytest.approx(IMPORTANCE), "every correction measures the same gap"
    assert not found.weighted.weight.requires_grad


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
def test_weights_against_float64_numpy(name: str, dtype: torch.dtype, tolerance: float) -> None:
    draw = np.random.default_rng(3)
    sample = np.repeat(np.arange(40), draw.integers(1, 9, 40))
    proximal = -draw.exponential(2.0, len(sample))
    behaviour = proximal + draw.normal(0.0, 0.6, len(sample))
    ratio = np.exp(proximal - behaviour)
    product = np.array([np.prod(ratio[sample == response]) for response in sample])
    expected = {
        "none": np.ones_like(ratio),
        "importance": ratio,
        "truncated_is": np.minimum(ratio, 2.0),
        "truncated_is_sequence": np.minimum(product, 2.0),
        "icepop": np.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0),
    }[name]
    tensors = (torch.from_numpy(values).to(dtype) for values in (proximal, behaviour))
    found = correct(name, *tensors, torch.from_numpy(sample), BOUNDS)
    assert found.weighted.weight.dtype == dtype
    np.testing.assert_allclose(found.weighted.weight.double().numpy(), expected, rtol=tolerance)


@conformance("truncated_is")
def test_the_weight_depends_on_the_proximal_policy_only() -> None:
    """Importance 3 (capped at 2) is proximal over behaviour; the clipped ratio 1.1 is current over proximal."""
    settings = LossSettings("clip_higher", 0.2, 0.28, None, "truncated_is", 2.0, 0.5, 5.0, 0.0, 0.0)
    logprobs = torch.tensor([math.log(0.33)], requires_grad=True)
    ones = torch.ones(1)
    data = TokenData(torch.tensor([math.log(0.1)]), ones, ones, torch.zeros(1, dtype=torch.int64))
    found = token_loss(logprobs, ones, torch.tensor([math.log(0.3)]), data, settings)
    assert found.loss.item() == pytest.approx(-2.2)
    found.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.2), "the weight carries no gradient"


@conformance("truncated_is_sequence")
def test_the_product_of_many_ratios_is_finite() -> None:
    gap = torch.full((2000,), 0.5)
    found = CORRECTIONS["truncated_is_sequence"](torch.cat([gap, -gap]), torch.arange(4000) // 2000, BOUNDS)
    assert found.weight.unique().tolist() == pytest.approx([math.exp(-20.0), 2.0])


@pytest.mark.conformance(formula="KL(behav || prox) ~ (w - 1) - log w, w = pi_prox / pi_behav", setting="mismatch_kl")
def test_mismatch_by_hand() -> None:
    proximal = torch.tensor([0.5, 0.6, 0.1]).log()
    behaviour = torch.tensor([0.25, 0.2, 0.2]).log()
    found = correct("none", proximal, behaviour, torch.zeros(3, dtype=torch.int64), BOUNDS)
    # (w - 1) - ln w at 2, 3 and 0.5
    assert found.mismatch_kl.tolist() == pytest.approx([0.306853, 0.901388, 0.193147], abs=1e-5)


@pytest.mark.conformance(formula="(sum w)^2 / (n sum w^2) (Kish)", setting="effective_sample_size")
def test_effective_share_by_hand() -> None:
    assert effective_share(8.0, 16.0, 4.0) == 1.0  # 2, 2, 2, 2
    assert effective_share(4.0, 16.0, 4.0) == 0.25  # 4, 0, 0, 0
    assert effective_share(0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("name", CORRECTED)
def test_the_metrics_show_the_effect_of_a_correction(name: str) -> None:
    settings = LossSettings("clip_higher", 0.2, 0.28, None, name, 2.0, 0.5, 5.0, 0.0, 0.0)
    behaviour = torch.full((5,), -9.0, dtype=torch.float64)
    gap = torch.tensor([2.0 - 1e-9, 3.0, 0.4, 0.5 + 1e-9, 6.0], dtype=torch.float64).log()
    ones = torch.ones(5, dtype=torch.float64)
    result = token_loss(behaviour + gap, ones, behaviour + gap, TokenData(behaviour, ones, ones, SAMPLE), settings)
    found = means(result.sums, result.histograms)
    _, capped, masked = BY_HAND[name]
    assert found["capped_share"] == pytest.approx(sum(capped) / 5)
    assert found["masked_share"] == pytest.approx(sum(masked) / 5)
    # sum 11.9, sum of squares 4 + 9 + 0.16 + 0.25 + 36 = 49.41
    assert found["effective_sample_size"] == pytest.approx(11.9**2 / (5 * 49.41))
    of_weights = {
        "none": 1.0,
        "importance": 11.9**2 / (5 * 49.41),
        "truncated_is": 6.9**2 / (5 * 12.41),
        "truncated_is_sequence": 7.6**2 / (5 * 12.32),
        "icepop": 5.5**2 / (5 * 13.25),
    }
    assert found["weight_effective_sample_size"] == pytest.approx(of_weights[name])
    assert found["mismatch_kl"] == pytest.approx((11.9 - 5 - math.log(2 * 3 * 0.4 * 0.5 * 6)) / 5)


@pytest.mark.conformance(
    formula="nearest-rank percentiles of pi_prox / pi_behav and of r", setting="importance_p*, ratio_p*"
)
def test_percentiles_of_many_micro_batches() -> None:
    """200 tokens in two parts: importance 0.5 twice, 1 in 195 cases, 4 three times; the ratio is always 1.25."""
    settings = LossSettings("clip_higher", 0.2, 0.28, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0)
    gap = torch.tensor([4.0] + [1.0] * 100 + [0.5] + [4.0] + [1.0] * 95 + [0.5, 4.0]).log()
    ones = torch.ones(100)
    sums, counts = 0, 0
    for part in gap.split(100):
        proximal = torch.full((100,), -3.0)
        data = TokenData(proximal - part, ones, ones, torch.zeros(100, dtype=torch.int64))
        result = token_loss(proximal + math.log(1.25), ones, proximal, data, settings)
        sums, counts = sums + result.sums, counts + result.histograms
    found = means(sums, counts)
    expected = {"importance_p1": 0.5, "importance_p50": 1.0, "importance_p99": 4.0}
    expected |= dict.fromkeys(("ratio_p1", "ratio_p50", "ratio_p99"), 1.25)
    for name, value in expected.items():
        assert math.log(found[name]) == pytest.approx(math.log(value), rel=0.022), name
    assert found["importance_p50"] == 1.0, "a gap of 0 is represented exactly"


@pytest.mark.conformance(
    formula="nearest-rank percentiles of pi_prox / pi_behav and of r", setting="importance_p*, ratio_p*"
)
@pytest.mark.parametrize("gap", [0.0, 1e-6, -3e-5, 1e-4, -1e-3, 0.01, -0.3, 1.0, -7.0, 20.0, -20.0])
def test_a_percentile_is_within_its_stated_resolution(gap: float) -> None:
    counts = histogram(torch.tensor([gap]))
    assert counts.shape == (BINS,)
    assert int(counts.sum()) == 1
    assert percentile(counts, 0.5) == pytest.approx(gap, abs=0.021 * math.hypot(gap, 1e-3))
