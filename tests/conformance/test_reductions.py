"""Every reduction on two groups, computed by hand, and properties that every reduction has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.loss import LossSettings, TokenData, token_loss
from learner.algorithm.reductions import REDUCTIONS, SampleSize
from tests.conformance.reduction_formulas import REDUCED

LONGEST = 10
# Group a: 2 tokens of value 3 and 6 of value 1. Group b: 8 masked tokens, 4 of value 2, and an empty response.
SAMPLES = [
    SampleSize("a", 2),
    SampleSize("a", 6),
    SampleSize("b", 8, masked=True),
    SampleSize("b", 4),
    SampleSize("b", 0),
]
WORTH = [3.0, 1.0, 100.0, 2.0, 50.0]
BY_HAND = {
    "token": 20 / 12,  # (6 + 6 + 8) / (2 + 6 + 4)
    "group_token": 1.75,  # a: 12 / 8 = 1.5; b: 8 / 4 = 2
    "sample": 2.0,  # (3 + 1 + 2) / 3
    "sequence_sum": 20 / 3,  # (6 + 6 + 8) / 3
    "constant_length": 2 / 3,  # (6 + 6 + 8) / 10 / 3
}
PLAIN = LossSettings("clip_higher", 0.2, 0.28, None, "none", 2.0, 0.5, 5.0, 0.0, 0.0)


@pytest.mark.parametrize("name", REDUCED)
def test_two_groups_by_hand(name: str) -> None:
    """At ratio 1 the objective of a token is its advantage, so minus the loss is the reduction of WORTH."""
    reduced = REDUCTIONS[name](SAMPLES, LONGEST)
    tokens = torch.tensor([sample.tokens for sample in SAMPLES])
    weight = torch.tensor(reduced.weights).repeat_interleave(tokens) / reduced.normaliser
    advantage = torch.tensor(WORTH).repeat_interleave(tokens)
    logprobs = torch.full((20,), -1.0)
    data = TokenData(logprobs, advantage, weight, torch.arange(5).repeat_interleave(tokens))
    found = token_loss(logprobs, torch.zeros(20), logprobs, data, PLAIN)
    assert -float(found.loss) == pytest.approx(BY_HAND[name], rel=1e-6)


@pytest.mark.parametrize("name", REDUCED)
def test_the_normaliser_is_0_if_no_sample_counts(name: str) -> None:
    found = REDUCTIONS[name]([SampleSize("a", 3, masked=True), SampleSize("a", 0)], LONGEST)
    assert (found.weights, found.normaliser) == ((0.0, 0.0), 0.0)


MEMBERS = st.lists(
    st.builds(SampleSize, st.sampled_from("abc"), st.integers(0, 50), st.booleans()), min_size=1, max_size=12
)
MEANS = [entry for entry in REDUCED if entry.values[0] in ("token", "group_token", "sample")]


@pytest.mark.parametrize("name", MEANS)
@given(samples=MEMBERS, constant=st.floats(-5, 5))
def test_the_mean_of_a_constant_is_the_constant(name: str, samples: list[SampleSize], constant: float) -> None:
    found = REDUCTIONS[name](samples, LONGEST)
    if not any(sample.counted for sample in samples):
        assert found.normaliser == 0
        return
    total = sum(weight * sample.tokens * constant for weight, sample in zip(found.weights, samples, strict=True))
    assert total / found.normaliser == pytest.approx(constant, abs=1e-9)


@pytest.mark.parametrize("name", REDUCED)
@given(samples=MEMBERS, data=st.data())
def test_order_does_not_matter(name: str, samples: list[SampleSize], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    found, moved = REDUCTIONS[name](samples, LONGEST), REDUCTIONS[name]([samples[index] for index in order], LONGEST)
    assert moved.weights == pytest.approx([found.weights[index] for index in order])
    assert moved.normaliser == found.normaliser


@pytest.mark.parametrize("name", REDUCED)
@given(samples=MEMBERS, tokens=st.integers(1, 50), group=st.sampled_from("abcd"))
def test_a_masked_response_changes_nothing(name: str, samples: list[SampleSize], tokens: int, group: str) -> None:
    found = REDUCTIONS[name](samples, LONGEST)
    more = REDUCTIONS[name]([*samples, SampleSize(group, tokens, masked=True)], LONGEST)
    assert more.weights == (*found.weights, 0.0)
    assert more.normaliser == found.normaliser
