"""Advantages by GAE and the clipped value loss, against sums as the papers write them, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.values import ValueTerm, gae, moments, value_loss, whitened

by_paper = pytest.mark.conformance(
    formula="A_t = sum (gamma lambda)^l delta_(t+l), returns = A + V (GAE Eq. 16)", setting="advantage = gae"
)
clipped_values = pytest.mark.conformance(
    formula="max((V - R)^2, (clip(V) - R)^2) / 2 (PPO, published code)", setting="value.clip"
)
SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])
RESPONSES = st.lists(st.tuples(st.integers(1, 70), st.floats(-2, 1)), min_size=1, max_size=6)


def one_by_one(values: list[float], reward: float, discount: float, trace: float) -> list[float]:
    """The sum of Eq. 16, term by term, for one response."""
    after = [*values[1:], 0.0]
    rewards = [0.0] * (len(values) - 1) + [reward]
    deltas = [r + discount * following - value for r, following, value in zip(rewards, after, values, strict=True)]
    return [sum((discount * trace) ** (k - t) * deltas[k] for k in range(t, len(values))) for t in range(len(values))]


@by_paper
@given(responses=RESPONSES, discount=SHARES, trace=SHARES, seed=st.integers(0, 2**31))
def test_advantages_are_the_sums_of_the_paper(
    responses: list[tuple[int, float]], discount: float, trace: float, seed: int
) -> None:
    torch.manual_seed(seed)
    lengths = torch.tensor([tokens for tokens, _ in responses])
    values = torch.randn(int(lengths.sum()), dtype=torch.float64)
    sample = torch.arange(len(responses)).repeat_interleave(lengths)
    reward = torch.tensor([score for _, score in responses], dtype=torch.float64).repeat_interleave(lengths)
    found = gae(values, reward, sample, discount, trace)
    expected = [
        advantage
        for part, (_, score) in zip(values.split(lengths.tolist()), responses, strict=True)
        for advantage in one_by_one(part.tolist(), score, discount, trace)
    ]
    assert found.advantage.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(found.returns, found.advantage + values, rtol=1e-12, atol=1e-12)


@by_paper
def test_known_values_give_known_advantages() -> None:
    """With discount and lambda 1, A is reward - V; with lambda 0, the one-step error."""
    values = torch.tensor([0.2, 0.5, -0.1], dtype=torch.float64)
    reward, sample = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert gae(values, reward, sample, 1.0, 1.0).advantage.tolist() == pytest.approx([0.8, 0.5, 1.1])
    assert gae(values, reward, sample, 1.0, 0.0).advantage.tolist() == pytest.approx([0.3, -0.6, 1.1])
    assert gae(values, reward, sample, 0.5, 0.0).advantage.tolist() == pytest.approx([0.05, -0.55, 1.1])


@by_paper
def test_a_response_of_twenty_thousand_tokens_is_exact() -> None:
    values, sample = torch.zeros(20_480), torch.zeros(20_480, dtype=torch.int64)
    found = gae(values, torch.ones(20_480), sample, 1.0, 0.9999)
    assert found.advantage[[0, -1]].tolist() == pytest.approx([0.9999**20_479, 1.0])
    assert found.advantage.dtype == torch.float32


@pytest.mark.conformance(formula="(A - mean) / std over all tokens of the batch", setting="value.whiten")
@given(cut=st.integers(0, 20), fillers=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_whitening_does_not_depend_on_the_cut(cut: int, fillers: int, seed: int) -> None:
    torch.manual_seed(seed)
    everything = torch.randn(20, dtype=torch.float64) * 3 + 2
    real = torch.tensor([True] * 20 + [False] * fillers)
    padded = torch.cat([everything, torch.full((fillers,), 1e6, dtype=torch.float64)])
    total = moments(padded[:cut], real[:cut]) + moments(padded[cut:], real[cut:])
    found = torch.cat([whitened(everything[:cut], total), whitened(everything[cut:], total)])
    torch.testing.assert_close(found, (everything - everything.mean()) / everything.std(correction=0))


@clipped_values
@pytest.mark.parametrize("clip", [0.1, 0.5, 100.0])
def test_the_value_loss_and_its_gradient(clip: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(50, dtype=torch.float64, requires_grad=True)
    before, returns = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    weight = torch.rand(50, dtype=torch.float64)
    found = value_loss(ValueTerm(values, before, returns), weight, clip)
    terms = []
    for value, old, target, share in zip(values, before, returns, weight, strict=True):
        change = float(value.detach() - old)
        limited = old + max(-clip, min(clip, change)) if abs(change) > clip else value
        errors = (value - target) ** 2, (limited - target) ** 2
        terms.append(share * max(errors, key=lambda error: float(error.detach())) / 2)
    expected = torch.stack(terms).sum()
    torch.testing.assert_close(found.loss, expected)
    gradients = [torch.autograd.grad(loss, values, retain_graph=True)[0] for loss in (found.loss, expected)]
    torch.testing.assert_close(*gradients)
    assert bool(found.clipped.any()) is (clip < 100)


@clipped_values
def test_a_filler_has_no_value_loss() -> None:
    values = torch.tensor([3.0], requires_grad=True)
    found = value_loss(ValueTerm(values, torch.zeros(1), torch.zeros(1)), torch.zeros(1), 0.2)
    assert (found.loss.item(), found.clipped.tolist()) == (0.0, [False])
