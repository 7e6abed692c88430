"""From a batch to weights per token: groups stay whole, and counts are the mini-batch's, over all ranks."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.training.minibatches import MiniBatch, PlannedSample, plan_step
from services.contracts import Batch, BatchGroup, BatchSample, SamplerState
from tests.conformance.reduction_formulas import REDUCED


def batch_of(*groups: list[tuple[int, bool]]) -> Batch:
    """Groups g0, g1, ... of responses as (tokens, masked)."""
    members = tuple(
        BatchGroup(group=f"g{number}", samples=tuple(
            BatchSample(payload=f"g{number}:{index}", tokens=tokens, advantage=1.0, reward=1.0, correct=True,
                        masked=masked, staleness=0)
            for index, (tokens, masked) in enumerate(samples)
        ))
        for number, samples in enumerate(groups)
    )  # fmt: skip
    return Batch(
        step=0, version=0, groups=members, sampler_state=SamplerState(cursor=0, next_group=0), sampling_metrics={},
        generation_started_at=0.0, generation_finished_at=0.0,
    )  # fmt: skip


def planned(plan: MiniBatch) -> list[PlannedSample]:
    return [one for share in plan.shares for one in share]


RESPONSES = st.tuples(st.integers(0, 30), st.booleans())
# First mini-batch: 2 + 6, and 4 beside a masked 8; second: 1 + 1, 3 + 5.
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
    """Two mini-batches by hand; how many ranks share them changes no weight, though each holds fewer tokens."""
    plans = plan_step(BATCH, 2, name, ranks, longest=20)
    found = [{one.payload: one.weight for one in planned(plan)} for plan in plans]
    keys = [["g0:0", "g0:1", "g1:1"], ["g2:0", "g2:1", "g3:0", "g3:1"]]
    for weights, names, expected in zip(found, keys, WEIGHTS[name], strict=True):
        assert sorted(weights) == names
        assert [weights[key] for key in names] == pytest.approx(expected)


@pytest.mark.parametrize("name", REDUCED)
@given(
    groups=st.lists(st.lists(RESPONSES, min_size=2, max_size=6), min_size=1, max_size=9),
    size=st.integers(1, 4), ranks=st.integers(1, 5),
)  # fmt: skip
def test_a_group_is_never_split_between_optimizer_steps(
    name: str, groups: list[list[tuple[int, bool]]], size: int, ranks: int
) -> None:
    """Mini-batches are consecutive whole groups; their shares hold each response that counts once, and no other."""
    plans = plan_step(batch_of(*groups), size, name, ranks, longest=30)
    homes = defaultdict(set)
    for step, plan in enumerate(plans):
        assert len(plan.shares) == ranks
        for one in planned(plan):
            homes[one.group].add(step)
    assert all(len(steps) == 1 for steps in homes.values())
    assert all(steps == {int(group[1:]) // size} for group, steps in homes.items())
    expected = [
        f"g{g}:{i}"
        for g, group in enumerate(groups)
        for i, (tokens, masked) in enumerate(group)
        if tokens and not masked
    ]
    assert sorted(one.payload for plan in plans for one in planned(plan)) == sorted(expected)


@pytest.mark.conformance(formula="a partial mini-batch is normalised by what it holds", setting="mini_batch_groups")
def test_the_last_mini_batch_counts_only_itself() -> None:
    first, last = plan_step(BATCH, 3, "token", 1, longest=20)
    assert {one.weight for one in planned(first)} == {1 / 14}
    assert {one.weight for one in planned(last)} == {1 / 8}


@pytest.mark.conformance(formula="groups stay whole on a rank where there are enough", setting="ranks")
def test_ranks_share_groups_not_responses() -> None:
    batch = batch_of(*[[(tokens, False)] * 4 for tokens in (9, 8, 7, 6)])
    (plan,) = plan_step(batch, 4, "token", 2, longest=20)
    assert [{one.group for one in share} for share in plan.shares] == [{"g0", "g3"}, {"g1", "g2"}]
    loads = [sum(one.tokens for one in share) for share in plan.shares]
    assert all(one == other for one, other in pairwise(loads))
