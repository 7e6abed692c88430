"""The ratio of a whole response: GSPO and GSPO-token by hand, and against the equations of arXiv 2507.18071."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.algorithm.loss import LossSettings, TokenData, TokenLoss, means, token_loss
from learner.algorithm.ratios import RATIOS

GSPO = LossSettings("clip_higher", 0.2, 0.28, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0, ratio="sequence")
GSPO_TOKEN = replace(GSPO, ratio="sequence_token")
gspo = pytest.mark.conformance(
    formula="min(s A, clip(s) A), s = (pi(y) / pi_old(y))^(1/|y|) (GSPO Eq. 5 and 7)", setting="ratio = sequence"
)
gspo_token = pytest.mark.conformance(
    formula="min(s_t A_t, clip(s_t) A_t), s_t = sg(s) pi(y_t) / sg(pi(y_t)) (GSPO Eq. 13 and 14)",
    setting="ratio = sequence_token",
)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lost(
    settings: LossSettings, ratios: Tensor, advantage: Tensor, weight: Tensor, sample: list[int], behaviour: float = 1.0
) -> tuple[TokenLoss, list[float]]:
    """The loss and its gradient for tokens with these ratios; the importance of each token is 1 / `behaviour`."""
    proximal = torch.full_like(ratios, 0.1).log()
    logprobs = (proximal + ratios.log()).requires_grad_()
    data = TokenData(proximal + math.log(behaviour), advantage, weight, torch.tensor(sample))
    found = token_loss(logprobs, torch.zeros_like(ratios), proximal, data, settings)
    found.loss.backward()
    assert logprobs.grad is not None
    return found, logprobs.grad.tolist()


@gspo
def test_by_hand() -> None:
    """Two responses: ratios 2 and 0.6 give s = sqrt(1.2) = 1.0954, ratios 4, 1 and 1 give s = 4^(1/3) = 1.5874.

    Both have advantage 1, so the second is clipped at 1.28 in all its tokens, although two of their ratios are 1.
    """
    weight = floats(1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6)
    found, gradient = lost(GSPO, floats(2, 0.6, 4, 1, 1), floats(1, 1, 1, 1, 1), weight, [0, 0, 1, 1, 1])
    assert found.loss.item() == pytest.approx(-(math.sqrt(1.2) + 1.28) / 2)
    # Eq. 10: s A / |y| for every token of the first response, over 2 responses
    assert gradient == pytest.approx([-math.sqrt(1.2) / 4] * 2 + [0.0] * 3)
    metrics = means(found.sums, found.histograms)
    assert (metrics["clip_high_share"], metrics["clip_low_share"]) == (0.6, 0.0), "shares are of tokens"
    assert metrics["ratio_mean"] == pytest.approx((2 * math.sqrt(1.2) + 3 * 4 ** (1 / 3)) / 5)


@gspo
@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope", "clipped"),
    [
        (1.5, 2.0, 2.56, 0.0, "clip_high_share"),
        (0.5, -2.0, -1.6, 0.0, "clip_low_share"),
        (0.5, 2.0, 1.0, 1.0, None),
        (1.5, -2.0, -3.0, -3.0, None),
        (4.0, -2.0, -6.0, 0.0, "dual_clip_share"),
    ],
)
def test_clips_hold_for_the_whole_response(
    ratio: float, advantage: float, gain: float, slope: float, clipped: str | None
) -> None:
    """Three tokens with ratios s / 8, s and 8 s, so that none but the second would be treated the same on its own."""
    settings = replace(GSPO, dual_clip=3.0)
    found, gradient = lost(
        settings, ratio * floats(1 / 8, 1, 8), floats(advantage, advantage, advantage), floats(1, 1, 1) / 3, [0, 0, 0]
    )
    assert found.loss.item() == pytest.approx(-gain)
    assert gradient == pytest.approx([-slope / 3] * 3)
    metrics = means(found.sums, found.histograms)
    shares = ("clip_low_share", "clip_high_share", "dual_clip_share")
    assert {name: metrics[name] for name in shares} == {name: float(name == clipped) for name in shares}


def drawn(seed: int) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """(lengths, log-probs, proximal log-probs, advantages of the responses) of eight responses."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (8,), generator=draw).tolist()
    proximal = -torch.rand(sum(lengths), generator=draw, dtype=torch.float64) - 0.1
    logprobs = proximal + 0.3 * torch.randn(sum(lengths), generator=draw, dtype=torch.float64)
    return lengths, logprobs.requires_grad_(), proximal, torch.randn(8, generator=draw, dtype=torch.float64)


def trained(
    settings: LossSettings, logprobs: Tensor, proximal: Tensor, lengths: list[int], advantage: Tensor
) -> Tensor:
    """The gradient of the mean over responses of their token means (the reduction `sample`), [N]."""
    tokens = torch.tensor(lengths)
    weight = (1 / (len(lengths) * tokens.double())).repeat_interleave(tokens)
    sample = torch.arange(len(lengths)).repeat_interleave(tokens)
    data = TokenData(proximal, advantage, weight, sample)
    found = token_loss(logprobs, torch.zeros_like(proximal), proximal, data, settings)
    return -torch.autograd.grad(found.loss, logprobs)[0]


@gspo
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_is_that_of_the_paper(seed: int) -> None:
    """Eq. 10, written out per response: 1/G s A 1/|y| sum over its tokens, where s is not clipped."""
    lengths, logprobs, proximal, advantages = drawn(seed)
    per_token = advantages.repeat_interleave(torch.tensor(lengths))
    found = trained(replace(GSPO, clip_low=0.05, clip_high=0.1), logprobs, proximal, lengths, per_token)
    expected = []
    for now, before, advantage in zip(logprobs.split(lengths), proximal.split(lengths), advantages, strict=True):
        likelihoods = math.exp(float(now.sum().detach())), math.exp(float(before.sum()))
        s = (likelihoods[0] / likelihoods[1]) ** (1 / len(now))
        kept = s <= 1.1 if advantage > 0 else s >= 0.95
        expected += [kept * s * float(advantage) / len(now) / 8] * len(now)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert 0.0 in expected, "some response is clipped"


@gspo_token
def test_equal_advantages_give_the_gradient_of_the_sequence() -> None:
    lengths, logprobs, proximal, advantages = drawn(3)
    per_token = advantages.repeat_interleave(torch.tensor(lengths))
    first, second = (trained(each, logprobs, proximal, lengths, per_token) for each in (GSPO, GSPO_TOKEN))
    assert torch.allclose(first, second, rtol=1e-12, atol=0)


@gspo_token
def test_advantages_may_vary_within_a_response() -> None:
    """Eq. 17: the gradient of each token is s A_t / |y|. Here s = sqrt(2 x 0.5) = 1, advantages 1 and -3."""
    found, gradient = lost(GSPO_TOKEN, floats(2, 0.5), floats(1, -3), floats(0.5, 0.5), [0, 0])
    assert found.loss.item() == pytest.approx(1.0)
    assert gradient == pytest.approx([-0.5, 1.5])
    _, mixed = lost(GSPO, floats(2, 0.5), floats(1, -3), floats(0.5, 0.5), [0, 0])
    assert mixed == pytest.approx([0.5, 0.5]), "with the ratio `sequence` their mean counts"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(GSPO, [-0.75, -0.75], marks=gspo),  # the mean weight (2 + 1) / 2, halved
        pytest.param(GSPO_TOKEN, [-1.0, -0.5], marks=gspo_token),
    ],
)
def test_weights_of_the_correction(settings: LossSettings, expected: list[float]) -> None:
    """Ratio 1 and importance 3 (capped at 2) and 1: the correction compares with the behaviour policy, per token."""
    proximal = floats(0.3, 0.3).log()
    logprobs = proximal.clone().requires_grad_()
    data = TokenData(floats(0.1, 0.3).log(), floats(1, 1), floats(0.5, 0.5), torch.tensor([0, 0]))
    token_loss(logprobs, floats(0, 0), proximal, data, replace(settings, correction="truncated_is")).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected)


@gspo
@pytest.mark.parametrize("name", ["sequence", "sequence_token"])
def test_the_ratio_of_a_long_response_is_exact(name: str) -> None:
    """20,000 float32 tokens, each 3e-4 nats off: the product of probabilities has no float, the mean log-ratio has."""
    proximal = torch.full((20_000,), -2.0)
    found = RATIOS[name](proximal + 3e-4, proximal, torch.zeros(20_000, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([3e-4] * 20_000, abs=2e-7)


@gspo
def test_an_outlier_stays_finite() -> None:
    found = RATIOS["sequence"](floats(-500, -500), floats(-1, -1), torch.tensor([0, 0]))
    assert found.tolist() == [-20.0, -20.0]
