"""Mini-batches, shares and micro-batches: the samples of each rank, and their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.training.minibatches import filler, micro_batches, plan_step
from learner.training.results import numbered
from learner.training.shares import PlannedSample
from services.contracts import Batch, BatchGroup, BatchSample
from services.streams.delivery.payloads import SamplePayload
from tests.harness.batches import batch_with


def batch_of(*groups: tuple[str, list[int], set[int]]) -> Batch:
    """Groups as (name, tokens per response, indices of masked responses)."""
    members = tuple(
        BatchGroup(
            group=name,
            samples=tuple(
                BatchSample(
                    payload=f"{name}{index}",
                    tokens=count,
                    advantage=1.0,
                    reward=1.0,
                    correct=True,
                    masked=index in masked,
                    staleness=0,
                )
                for index, count in enumerate(tokens)
            ),
        )
        for name, tokens, masked in groups
    )
    return batch_with(members)


def payload(prompt: list[int], response: list[int]) -> SamplePayload:
    behaviour = -np.arange(1, len(response) + 1, dtype=np.float32)
    return SamplePayload(np.array(prompt, np.int32), np.array(response, np.int32), behaviour, "", "stop", ())


def test_a_single_group_is_spread_over_the_ranks() -> None:
    plan = plan_step(batch_of(("a", [5, 5, 5, 5], set())), 1, "group_token", 2, longest=9, row_tokens=0)[0]
    assert [len(share) for share in plan.shares] == [2, 2]


def test_a_mini_batch_without_trainable_responses_is_an_error() -> None:
    plans = plan_step(batch_of(("a", [5, 5], {0, 1}), ("b", [5, 5], set())), 1, "token", 1, longest=9, row_tokens=0)
    assert [plan.trainable for plan in plans] == [False, True]


def test_groups_are_numbered_by_the_step_that_trains_them() -> None:
    """A mini-batch without trainable responses makes no optimizer step; one of a group is trained with the others."""
    groups = [("a", [5], set()), ("b", [5], {0}), ("c", [5], {0}), ("d", [5], {0}), ("e", [5], set())]
    plans = plan_step(batch_of(*groups), 2, "token", 2, longest=9, row_tokens=0)
    numbers = numbered(plans)
    assert numbers == {"a": 1, "b": 1, "e": 2}
    for number, plan in enumerate((plan for plan in plans if plan.trainable), start=1):
        assert {numbers[sample.group] for share in plan.shares for sample in share} == {number}


def planned(key: str, group: str, tokens: int) -> PlannedSample:
    return PlannedSample(key, group, tokens, advantage=float(tokens), weight=0.5)


def test_a_shared_row_by_hand() -> None:
    payloads = {"x": payload([7, 8], [1, 2, 3]), "y": payload([7, 8], [4, 5])}
    (micro_batch,) = micro_batches([planned("x", "g", 3), planned("y", "g", 2)], payloads, 64, share_prompts=True)
    assert micro_batch.input_ids.tolist() == [[7, 8, 1, 2, 4]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert micro_batch.source.tolist() == [1, 2, 3, 1, 4]
    assert micro_batch.targets.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.data.behaviour.tolist() == [-1, -2, -3, -1, -2]
    assert micro_batch.data.advantage.tolist() == [3, 3, 3, 2, 2]
    assert micro_batch.data.sample.tolist() == [0, 0, 0, 1, 1]
    assert micro_batch.rows == ((2, 2, 1),)


def test_rows_end_to_end_by_hand() -> None:
    """A response of one token has no input of its own, and a response alone follows its prompt as one segment."""
    payloads = {"x": payload([7, 8], [1]), "y": payload([7, 8], [4, 5]), "z": payload([9], [6, 3])}
    share = [planned("x", "g", 1), planned("y", "g", 2), planned("z", "h", 2)]
    (micro_batch,) = micro_batches(share, payloads, 64, share_prompts=True)
    assert micro_batch.input_ids.tolist() == [[7, 8, 4, 9, 6]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert micro_batch.rows == ((2, 1), (2,))
    assert micro_batch.source.tolist() == [1, 1, 2, 3, 4]
    assert micro_batch.targets.tolist() == [1, 4, 5, 6, 3]


def test_plain_rows_by_hand() -> None:
    payloads = {"x": payload([7, 8], [1, 2, 3]), "y": payload([9], [4, 5])}
    share = [planned("y", "h", 2), planned("x", "g", 3)]
    (micro_batch,) = micro_batches(share, payloads, 64, share_prompts=False)
    assert micro_batch.rows is None
    assert micro_batch.input_ids.tolist() == [[7, 8, 1, 2], [9, 4, 0, 0]]
    assert micro_batch.source.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.targets.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.data.sample.tolist() == [0, 0, 0, 1, 1]


def test_responses_are_numbered_over_all_rows_of_a_micro_batch() -> None:
    payloads = {"x": payload([7, 8], [1, 2]), "y": payload([7, 8], [4]), "z": payload([9], [5])}
    share = [planned("x", "g", 2), planned("y", "g", 1), planned("z", "h", 1)]
    (micro_batch,) = micro_batches(share, payloads, 64, share_prompts=True)
    assert micro_batch.input_ids.tolist() == [[7, 8, 1, 9]]
    assert micro_batch.targets.tolist() == [1, 2, 4, 5]
    assert micro_batch.data.sample.tolist() == [0, 0, 1, 2]


def test_numbers_are_rounded_once_at_the_end() -> None:
    third = PlannedSample("x", "g", 1, advantage=1 / 3, weight=1 / 7)
    (micro_batch,) = micro_batches([third], {"x": payload([7], [1])}, 64, share_prompts=True)
    assert (micro_batch.data.advantage.tolist(), micro_batch.data.weight.tolist()) == ([1 / 3], [1 / 7])
    rounded = micro_batch.to(torch.device("cpu"), torch.float32)
    assert rounded.data.weight.dtype == rounded.data.advantage.dtype == rounded.data.behaviour.dtype == torch.float32
    assert rounded.data.sample.dtype == rounded.targets.dtype == torch.int64


def test_the_budget_counts_padding_and_a_long_sample_is_alone() -> None:
    payloads = {f"s{index}": payload([1, 2, 3], [1] * tokens) for index, tokens in enumerate([30, 6, 5, 4, 3])}
    share = [planned(f"s{index}", str(index), tokens) for index, tokens in enumerate([30, 6, 5, 4, 3])]
    found = micro_batches(share, payloads, 20, share_prompts=False)
    assert [tuple(micro_batch.input_ids.shape) for micro_batch in found] == [(1, 32), (2, 8), (2, 6)]
    assert sum(micro_batch.targets.numel() for micro_batch in found) == 48


def test_rows_end_to_end_fill_the_budget() -> None:
    payloads = {f"s{index}": payload([index, 2, 3], [1] * tokens) for index, tokens in enumerate([30, 6, 5, 4, 3])}
    share = [planned(f"s{index}", str(index), tokens) for index, tokens in enumerate([30, 6, 5, 4, 3])]
    found = micro_batches(share, payloads, 20, share_prompts=True)
    assert [(micro_batch.input_ids.shape[1], micro_batch.rows) for micro_batch in found] == [
        (32, ((32,),)),
        (15, ((8,), (7,))),
        (11, ((6,), (5,))),
    ]


def test_a_payload_that_disagrees_with_its_batch_is_named() -> None:
    with pytest.raises(ValueError, match="payload x holds 2 response tokens: expected 3"):
        micro_batches([planned("x", "g", 3)], {"x": payload([1], [1, 2])}, 64, share_prompts=True)


def test_a_filler_has_no_weight() -> None:
    assert torch.count_nonzero(filler().data.weight) == 0
