"""From a batch to token weights: groups stay whole, and weights follow from the mini-batch over all ranks."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.training.minibatches import MiniBatch, plan_step
from learner.training.shares import PlannedSample, distribute
from services.contracts import Batch, BatchGroup, BatchSample
from tests.conformance.reduction_formulas import REDUCED
from tests.harness.batches import batch_with


def batch_of(*groups: list[tuple[int, bool]]) -> Batch:
    """Groups g0, g1, ... of responses as (tokens, masked)."""
    members = []
    for number, sizes in enumerate(groups):
        samples = tuple(
            BatchSample(
                payload=f"g{number}:{index}",
                tokens=tokens,
                advantage=1.0,
                reward=1.0,
                correct=True,
                masked=masked,
                staleness=0,
            )
            for index, (tokens, masked) in enumerate(sizes)
        )
        members.append(BatchGroup(group=f"g{number}", samples=samples, prompt_tokens=1))
    return batch_with(members)


def planned(plan: MiniBatch) -> list[PlannedSample]:
    return [sample for share in plan.shares for sample in share]


RESPONSES = st.tuples(st.integers(0, 30), st.booleans())
# First mini-batch: 2 + 6, and 4 next to a masked 8; second: 1 + 1, 3 + 5.
BATCH = batch_of([(2, False), (6, False)], [(8, True), (4, False)], [(1, False), (1, False)], [(3, False), (5, False)])
WEIGHTS = {
    "token": [[1 / 12] * 3, [1 / 10] * 4],
    "group_token": [[1 / 16, 1 / 16, 1 / 8], [1 / 4, 1 / 4, 1 / 16, 1 / 16]],
    "sample": [[1 / 6, 1 / 18, 1 / 12], [1 / 4, 1 / 4, 1 / 12, 1 / 20]],
    "sequence_sum": [[1 / 3] * 3, [1 / 4] * 4],
    "constant_length": [[1 / 60] * 3, [1 / 80] * 4],
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_count_the_tokens_of_all_ranks(name: str, ranks: int) -> None:
    """Two mini-batches by hand. The number of ranks changes no weight, although each rank has fewer tokens."""
    plans = plan_step(BATCH, 2, name, ranks, longest=20, row_tokens=0)
    found = [{sample.payload: sample.weight for sample in planned(plan)} for plan in plans]
    keys = [["g0:0", "g0:1", "g1:1"], ["g2:0", "g2:1", "g3:0", "g3:1"]]
    for weights, names, expected in zip(found, keys, WEIGHTS[name], strict=True):
        assert sorted(weights) == names
        assert [weights[key] for key in names] == pytest.approx(expected)


@pytest.mark.parametrize("name", REDUCED)
@given(
    groups=st.lists(st.lists(RESPONSES, min_size=2, max_size=6), min_size=1, max_size=9),
    size=st.integers(1, 4),
    ranks=st.integers(1, 5),
)
def test_a_group_is_never_split_between_optimizer_steps(
    name: str, groups: list[list[tuple[int, bool]]], size: int, ranks: int
) -> None:
    """Mini-batches are consecutive whole groups. Their shares contain each response that counts once, and no other."""
    plans = plan_step(batch_of(*groups), size, name, ranks, longest=30, row_tokens=0)
    homes = defaultdict(set)
    for step, plan in enumerate(plans):
        assert len(plan.shares) == ranks
        for sample in planned(plan):
            homes[sample.group].add(step)
    assert all(len(steps) == 1 for steps in homes.values())
    assert all(steps == {int(group[1:]) // size} for group, steps in homes.items())
    expected = [
        f"g{g}:{i}"
        for g, group in enumerate(groups)
        for i, (tokens, masked) in enumerate(group)
        if tokens and not masked
    ]
    assert sorted(sample.payload for plan in plans for sample in planned(plan)) == sorted(expected)


@pytest.mark.conformance(formula="a partial mini-batch is normalised by its own size", setting="mini_batch_groups")
def test_a_partial_mini_batch_is_normalised_by_its_size() -> None:
    first, last = plan_step(BATCH, 3, "token", 1, longest=20, row_tokens=0)
    assert {sample.weight for sample in planned(first)} == {1 / 14}
    assert {sample.weight for sample in planned(last)} == {1 / 8}


@pytest.mark.conformance(formula="responses that share a row of their prompt stay on one rank", setting="ranks")
def test_responses_that_share_a_row_stay_together() -> None:
    batch = batch_of(*[[(tokens, False)] * 4 for tokens in (9, 8, 7, 6)])
    (plan,) = plan_step(batch, 4, "token", 2, longest=20, row_tokens=36)
    assert [{sample.group for sample in share} for share in plan.shares] == [{"g0", "g3"}, {"g1", "g2"}]
    loads = [sum(sample.tokens for sample in share) for share in plan.shares]
    assert all(load == following for load, following in pairwise(loads))


@pytest.mark.conformance(formula="responses that share no row are balanced one by one", setting="ranks")
def test_responses_without_a_shared_row_are_balanced() -> None:
    """Kept whole, the groups give 36 and 8 tokens. By response, both ranks have 22."""
    batch = batch_of([(9, False)] * 4, [(2, False)] * 4)
    (plan,) = plan_step(batch, 2, "token", 2, longest=20, row_tokens=0)
    assert [sorted(sample.tokens for sample in share) for share in plan.shares] == [[2, 2, 9, 9]] * 2


LENGTHS = st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=8), min_size=1, max_size=12)


@pytest.mark.conformance(formula="batches of older releases are shared out as they were there", setting="ranks")
def test_groups_whose_prompts_have_no_known_length_stay_whole() -> None:
    batch = batch_of([(9, False)] * 4, [(2, False)] * 4)
    older = batch.model_copy(
        update={"groups": tuple(group.model_copy(update={"prompt_tokens": 0}) for group in batch.groups)}
    )
    (plan,) = plan_step(older, 2, "token", 2, longest=20, row_tokens=9)
    assert [{sample.group for sample in share} for share in plan.shares] == [{"g0"}, {"g1"}]


BALANCED = pytest.mark.conformance(formula="every rank has about the same work", setting="ranks")


@BALANCED
@given(lengths=LENGTHS, prompts=st.integers(1, 99), ranks=st.integers(1, 70), row_tokens=st.integers(0, 800))
def test_no_rank_exceeds_the_mean_by_more_than_one_row(
    lengths: list[list[int]], prompts: int, ranks: int, row_tokens: int
) -> None:
    """The bound of every list schedule (Graham 1966): the busiest rank was the least busy before its last row."""
    groups = {
        f"g{number}": [
            PlannedSample(f"g{number}:{index}", f"g{number}", tokens, 1.0, 1.0) for index, tokens in enumerate(sizes)
        ]
        for number, sizes in enumerate(lengths)
    }
    found = distribute(groups, dict.fromkeys(groups, prompts), ranks, row_tokens)
    everything = [sample for members in groups.values() for sample in members]
    assert sorted(sample.payload for share in found.shares for sample in share) == sorted(s.payload for s in everything)
    longest = max(prompts + max(row_tokens, *(sample.tokens for sample in everything)), row_tokens)
    assert max(found.tokens) <= sum(found.tokens) / ranks + longest


@BALANCED
def test_64_ranks_share_32_groups_of_long_responses_evenly() -> None:
    """A mini-batch of the 32B recipe: prompts of very different lengths of response, up to 20,480 tokens."""
    draw = Random(0)
    means = [draw.expovariate(1 / 6000) for _ in range(32)]
    groups = {
        f"g{number}": [
            PlannedSample(
                f"g{number}:{index}", f"g{number}", min(20_480, 1 + int(draw.expovariate(1 / mean))), 1.0, 1.0
            )
            for index in range(16)
        ]
        for number, mean in enumerate(means)
    }
    assert distribute(groups, dict.fromkeys(groups, 300), 64, row_tokens=1024).balance > 0.95
