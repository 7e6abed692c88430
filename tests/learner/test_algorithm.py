"""The token-level tables against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from learner.algorithm.clipping import CLIPPINGS
from learner.algorithm.corrections import CORRECTIONS, effective_share
from learner.algorithm.logprobs import token_logprobs
from learner.algorithm.loss import SUMS, LossSettings, TokenData, means, token_loss
from learner.algorithm.reductions import REDUCTIONS, SampleSize
from services.settings import Algorithm

# Two groups; b's first response is masked: 2 + 6 + 4 = 12 tokens count.
SAMPLES = [
    SampleSize("a", 2), SampleSize("a", 6), SampleSize("b", 8, masked=True), SampleSize("b", 4), SampleSize("b", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "weights", "normaliser"),
    [
        ("token", (1, 1, 0, 1, 0), 12),
        ("group_token", (1 / 8, 1 / 8, 0, 1 / 4, 0), 2),
        ("sample", (1 / 2, 1 / 6, 0, 1 / 4, 0), 3),
        ("sequence_sum", (1, 1, 0, 1, 0), 3),
    ],
)
def test_reduction(name: str, weights: tuple[float, ...], normaliser: float) -> None:
    found = REDUCTIONS[name](SAMPLES)
    assert found.weights == pytest.approx(weights)
    assert found.normaliser == normaliser


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_of_nothing_has_no_normaliser(name: str) -> None:
    found = REDUCTIONS[name]([SampleSize("a", 3, masked=True)])
    assert (found.weights, found.normaliser) == ((0.0,), 0.0)


@pytest.mark.parametrize("name", ["token", "group_token", "sample"])
def test_mean_reductions_of_a_constant_give_the_constant(name: str) -> None:
    found = REDUCTIONS[name](SAMPLES)
    total = sum(weight * one.tokens for weight, one in zip(found.weights, SAMPLES, strict=True))
    assert total / found.normaliser == pytest.approx(1.0)


def test_tables_offer_what_the_settings_accept() -> None:
    fields = Algorithm.model_fields
    assert set(REDUCTIONS) == set(fields["reduction"].annotation.__args__)  # type: ignore[union-attr]
    assert {*CORRECTIONS, "auto"} == set(fields["correction"].annotation.__args__)  # type: ignore[union-attr]
    assert set(CLIPPINGS) == set(fields["preset"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "low", "high", "slope"),
    [
        (1.0, 2.0, 2.0, False, False, 2.0),
        (1.5, 2.0, 2.56, False, True, 0.0),    # cut at 1.28
        (0.5, 2.0, 1.0, False, False, 2.0),    # a rise from far below stays free
        (0.5, -2.0, -1.6, True, False, 0.0),   # cut at 0.8
        (1.5, -2.0, -3.0, False, False, -2.0), # no bound on what made things worse (no dual clip)
    ],
)  # fmt: skip
def test_clip_higher(ratio: float, advantage: float, objective: float, low: bool, high: bool, slope: float) -> None:
    one = torch.tensor([ratio], requires_grad=True)
    found = CLIPPINGS["dapo"](one, torch.tensor([advantage]), 0.2, 0.28)
    assert found.objective.item() == pytest.approx(objective)
    assert (found.low.item(), found.high.item()) == (low, high)
    found.objective.sum().backward()
    assert one.grad is not None
    assert one.grad.item() == pytest.approx(slope)


def test_truncated_importance_sampling() -> None:
    proximal = torch.tensor([math.log(0.5), math.log(0.6), math.log(0.1)], requires_grad=True)
    behaviour = torch.tensor([math.log(0.25), math.log(0.2), math.log(0.2)])
    found = CORRECTIONS["truncated_is"](proximal, behaviour, 2.0)
    assert found.weight.tolist() == pytest.approx([2.0, 2.0, 0.5])
    assert found.importance.tolist() == pytest.approx([2.0, 3.0, 0.5])
    assert found.capped.tolist() == [0.0, 1.0, 0.0]
    # (w - 1) - ln w at 2, 3 and 0.5
    assert found.mismatch_kl.tolist() == pytest.approx([0.306853, 0.901388, 0.193147], abs=1e-5)
    assert not found.weight.requires_grad
    assert CORRECTIONS["none"](proximal, behaviour, 2.0).weight.tolist() == [1.0, 1.0, 1.0]


def test_effective_share() -> None:
    assert effective_share(8.0, 16.0, 4.0) == 1.0
    assert effective_share(4.0, 16.0, 4.0) == 0.25  # all weight on one of four
    assert effective_share(0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("chunks", [None, 1, 3, 9])
def test_logprobs_and_entropies_are_those_of_the_full_softmax(chunks: int | None) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11, bias=False)
    hidden = torch.randn(7, 5, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    found, entropy = token_logprobs(hidden, targets, head, 0.5, chunks)
    expected = torch.log_softmax(head(hidden) / 0.5, -1)
    assert torch.allclose(found, expected.gather(-1, targets[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)
    assert not entropy.requires_grad
    scale = torch.randn(7)
    gradients = torch.autograd.grad((found * scale).sum(), [hidden, head.weight], retain_graph=True)
    wanted = torch.autograd.grad((expected.gather(-1, targets[:, None])[:, 0] * scale).sum(), [hidden, head.weight])
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_loss_by_hand() -> None:
    """Three tokens over a normaliser of 4, the last a filler: ratios 1.5, 0.5; importance 3 (capped at 2), 0.5."""
    proximal = torch.tensor([math.log(0.3), math.log(0.2), math.log(0.5)])
    logprobs = torch.tensor([math.log(0.45), math.log(0.1), math.log(0.5)], requires_grad=True)
    data = TokenData(
        behaviour=torch.tensor([math.log(0.1), math.log(0.4), 0.0]),
        advantage=torch.tensor([1.0, 1.0, 9.0]), weight=torch.tensor([0.25, 0.25, 0.0]),
    )  # fmt: skip
    settings = LossSettings("dapo", 0.2, 0.28, "truncated_is", 2.0)
    loss, sums = token_loss(logprobs, torch.tensor([1.0, 2.0, 7.0]), proximal, data, settings)
    # -(2 x 1.28 + 0.5 x 0.5) / 4
    assert loss.item() == pytest.approx(-0.7025)
    loss.backward()
    assert logprobs.grad is not None
    # the first is clipped; the second: -0.25 x 0.5 x 1 x ratio 0.5
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.0625, 0.0])
    found = means(sums.tolist())
    assert dict(zip(SUMS, sums.tolist(), strict=True))["tokens"] == 2
    assert found["entropy"] == 1.5
    assert found["mean_token_probability"] == pytest.approx(0.275)
    assert found["clip_high_share"] == 0.5
    assert found["clip_low_share"] == 0.0
    assert found["ratio_mean"] == pytest.approx(1.0)
    assert found["capped_share"] == 0.5
    assert found["effective_sample_size"] == pytest.approx(3.5**2 / (2 * 9.25))
