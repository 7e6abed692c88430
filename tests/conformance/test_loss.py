"""The token loss: each term by hand, and independence of how tokens are cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.loss import SUMS, LossSettings, TokenData, TokenLoss, means, token_loss
from learner.algorithm.ratios import RATIOS

DAPO = LossSettings("clip_higher", 0.2, 0.28, None, "truncated_is", 2.0, 0.5, 5.0, 0.0, 0.0)
EVERYTHING = replace(
    DAPO, dual_clip=3.0, correction="truncated_is_sequence", kl_coefficient=0.1, entropy_coefficient=0.01
)
eq_8 = pytest.mark.conformance(formula="-sum weight x w x min(r A, clip(r) A) (DAPO Eq. 8)", setting="algorithm.*")


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@eq_8
def test_by_hand() -> None:
    """Three tokens, normaliser 4, the last is a filler: ratios 1.5 and 0.5, importance 3 (capped at 2) and 0.5."""
    logprobs = log(0.45, 0.1, 0.5).requires_grad_()
    data = TokenData(log(0.1, 0.4, 1.0), floats(1, 1, 9), floats(0.25, 0.25, 0), torch.tensor([0, 0, 1]))
    found = token_loss(logprobs, floats(1, 2, 7), log(0.3, 0.2, 0.5), data, DAPO)
    # -(2 x 1.28 + 0.5 x 0.5) / 4
    assert found.loss.item() == pytest.approx(-0.7025)
    found.loss.backward()
    assert logprobs.grad is not None
    # the first token is clipped; the second: -0.25 x 0.5 x 1 x ratio 0.5
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.0625, 0.0])
    metrics = means(found.sums, found.histograms)
    expected = {
        "trained_tokens": 2,
        "entropy": 1.5,
        "mean_token_probability": 0.275,
        "clip_high_share": 0.5,
        "clip_low_share": 0.0,
        "dual_clip_share": 0.0,
        "ratio_mean": 1.0,
        "capped_share": 0.5,
        "masked_share": 0.0,
        "effective_sample_size": 3.5**2 / (2 * 9.25),
        "weight_effective_sample_size": 2.5**2 / (2 * 4.25),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "kl_reference" not in metrics, "kl_reference needs a reference"
    assert float(found.sums[SUMS.index("loss")]) == pytest.approx(-0.7025)


@pytest.mark.conformance(
    formula="min(r A_t, clip(r) A_t) with one A_t per token (as GAE needs)", setting="algorithm.advantage"
)
def test_advantages_may_vary_within_a_response() -> None:
    """One response with advantages 1, -2, 0.5 and ratios 1.5, 1.5, 0.5: 1.28 - 3 + 0.25 = -1.47."""
    proximal = log(0.2, 0.2, 0.2)
    logprobs = log(0.3, 0.3, 0.1).requires_grad_()
    data = TokenData(proximal, floats(1, -2, 0.5), floats(1, 1, 1), torch.zeros(3, dtype=torch.int64))
    found = token_loss(logprobs, floats(0, 0, 0), proximal, data, DAPO)
    assert found.loss.item() == pytest.approx(1.47)
    found.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 3.0, -0.25])


@pytest.mark.conformance(formula="J - beta KL(pi || ref) (GRPO Eq. 3)", setting="kl_coefficient")
def test_the_kl_term_by_hand() -> None:
    """Ratio 1, advantage 1, importance 2, which does not weight the KL: -(0.5 (2 - 0.01931) + 0.5 (2 - 0.03069))."""
    proximal = log(0.5, 0.25)
    logprobs = proximal.clone().requires_grad_()
    data = TokenData(log(0.25, 0.125), floats(1, 1), floats(0.5, 0.5), torch.tensor([0, 0]))
    grpo = replace(DAPO, clipping="symmetric", clip_high=0.2, correction="importance", kl_coefficient=0.1)
    found = token_loss(logprobs, floats(0, 0), proximal, data, grpo, log(0.25, 0.5))
    assert found.loss.item() == pytest.approx(-1.975)
    found.loss.backward()
    assert logprobs.grad is not None
    # -0.5 (2 - 0.1 x (1 - ref / pi)): ref / pi = 0.5 and 2
    assert logprobs.grad.tolist() == pytest.approx([-0.975, -1.05])
    assert means(found.sums, found.histograms)["kl_reference"] == pytest.approx(0.25)


@pytest.mark.conformance(formula="J - beta KL(pi || ref) (GRPO Eq. 3)", setting="kl_coefficient")
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_reference_is_required_with_a_coefficient_only(coefficient: float) -> None:
    value = floats(-1)
    data = TokenData(value, value, -value, torch.tensor([0]))
    with pytest.raises(ValueError, match=f"kl_coefficient = {coefficient}"):
        token_loss(value, value, value, data, replace(DAPO, kl_coefficient=coefficient), None if coefficient else value)


@pytest.mark.conformance(formula="J + c H(pi)", setting="entropy_coefficient")
def test_the_entropy_bonus_by_hand() -> None:
    """Weights 0.5: -(0.5 (1 + 0.01 x 3) + 0.5 (1 + 0.01 x 1)) = -1.02; the slope of each entropy is -0.5 x 0.01."""
    proximal = log(0.5, 0.25)
    entropy = floats(3, 1).requires_grad_()
    data = TokenData(proximal, floats(1, 1), floats(0.5, 0.5), torch.tensor([0, 0]))
    found = token_loss(
        proximal.clone().requires_grad_(), entropy, proximal, data, replace(DAPO, entropy_coefficient=0.01)
    )
    assert found.loss.item() == pytest.approx(-1.02)
    found.loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.005, -0.005])


@eq_8
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_keeps_the_dtype_of_the_log_probs(dtype: torch.dtype) -> None:
    logprobs, entropy, proximal, data, reference = _tokens([3, 2], seed=1, dtype=dtype)
    found = token_loss(logprobs, entropy, proximal, data, EVERYTHING, reference)
    assert found.loss.dtype == dtype
    assert found.sums.dtype == torch.float64
    assert found.histograms.dtype == torch.int64


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenData, torch.Tensor]


def _tokens(lengths: list[int], seed: int, dtype: torch.dtype = torch.float64) -> Tokens:
    """Responses of `lengths` tokens. The policies differ enough for every bound to apply to some token."""
    draw = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(size, generator=draw, dtype=torch.float64)

    proximal = -normal(2.0).abs()
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    columns = (
        proximal + normal(0.7),
        normal(1.0).abs(),
        proximal,
        proximal + normal(0.7),
        normal(1.0),
        normal(1.0).abs() + 0.01,
        proximal + normal(0.3),
    )
    logprobs, entropy, proximal, behaviour, advantage, weight, reference = (column.to(dtype) for column in columns)
    return logprobs.requires_grad_(), entropy, proximal, TokenData(behaviour, advantage, weight, sample), reference


def _part(whole: Tokens, wanted: list[int]) -> Tokens:
    """One micro-batch: the responses `wanted`, in that order and numbered from 0."""
    logprobs, entropy, proximal, data, reference = whole
    rows = torch.cat([torch.nonzero(data.sample == response)[:, 0] for response in wanted])
    lengths = torch.tensor([int((data.sample == response).sum()) for response in wanted])
    sample = torch.arange(len(wanted)).repeat_interleave(lengths)
    part = TokenData(data.behaviour[rows], data.advantage[rows], data.weight[rows], sample)
    return logprobs[rows], entropy[rows], proximal[rows], part, reference[rows]


def _run(whole: Tokens, chosen: LossSettings) -> TokenLoss:
    *first, reference = whole
    return token_loss(*first, chosen, reference if chosen.kl_coefficient else None)


@pytest.mark.conformance(formula="one sum over the mini-batch, for any micro-batches", setting="micro_batch_tokens")
@settings(max_examples=120)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    seed=st.integers(0, 10**6),
    data=st.data(),
    correction=st.sampled_from(["none", "importance", "truncated_is", "truncated_is_sequence", "icepop"]),
    ratio=st.sampled_from(sorted(RATIOS)),
    clipping=st.sampled_from(sorted(CLIPPINGS)),
)
def test_any_split_and_order_gives_the_same(
    lengths: list[int], seed: int, data: st.DataObject, correction: str, ratio: str, clipping: str
) -> None:
    """The loss, gradient, sums and histograms of the parts add up to those of the whole."""
    chosen = replace(EVERYTHING, correction=correction, ratio=ratio, clipping=clipping)
    whole = _tokens(lengths, seed)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    expected = _run(whole, chosen)
    (gradient,) = torch.autograd.grad(expected.loss, whole[0])
    parts = [_run(_part(whole, wanted), chosen) for wanted in (order[:cut], order[cut:])]
    loss = parts[0].loss + parts[1].loss
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-10)
    assert torch.allclose(torch.autograd.grad(loss, whole[0])[0], gradient, rtol=1e-10, atol=1e-12)
    assert torch.allclose(parts[0].sums + parts[1].sums, expected.sums, rtol=1e-10)
    assert torch.equal(parts[0].histograms + parts[1].histograms, expected.histograms)


@pytest.mark.conformance(formula="a filler (weight 0) changes nothing", setting="fillers")
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    ratio=st.sampled_from(sorted(RATIOS)),
)
def test_fillers_count_nowhere(lengths: list[int], seed: int, ratio: str) -> None:
    """A last response of weight 0, as in the filler of a rank, changes no loss, gradient or metric."""
    whole, chosen = _tokens([*lengths, 4], seed), replace(EVERYTHING, ratio=ratio)
    data = whole[3]
    padded = (*whole[:3], replace(data, weight=torch.where(data.sample == len(lengths), 0.0, data.weight)), whole[4])
    expected = _run(_part(whole, list(range(len(lengths)))), chosen)
    found = _run(padded, chosen)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert torch.allclose(found.sums, expected.sums, rtol=1e-12)
    assert torch.equal(found.histograms, expected.histograms)
    assert torch.count_nonzero(torch.autograd.grad(found.loss, whole[0])[0][-4:]) == 0


@eq_8
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_gradient_is_the_slope_of_the_loss(ratio: str) -> None:
    """Finite differences in float64, with all terms enabled. The correction weight is constant, as it must be."""
    chosen = replace(EVERYTHING, ratio=ratio)
    whole = _tokens([4, 3], seed=11)
    logprobs, entropy = whole[0], whole[1].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda first, second: _run((first, second, *whole[2:]), chosen).loss, (logprobs, entropy)
    )
