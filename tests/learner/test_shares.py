"""Each rank of several fetches, trains and masks what the plan gives to it, and no other rank."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from learner.rank.batch_training import BatchTraining
from learner.rank.context import RankContext
from learner.training.minibatches import MiniBatch, plan_step
from learner.training.results import Trained
from services.contracts import Batch
from services.streams.delivery.payloads import SamplePayload, pack
from services.streams.keys import RunKeys
from tests.harness.small_run import recipe_document, service_context
from tests.learner.committed import WRITER
from tests.learner.running import draw_batch


def plan(batch: Batch) -> list[MiniBatch]:
    return plan_step(batch, 2, "token", 2, longest=16, row_tokens=0)


async def test_rank_1_trains_its_own_share(redis: Any, run_id: str) -> None:
    """Its first payload is damaged, so that the loss of that sample, of no other, is masked."""
    batch, payloads = draw_batch(RunKeys(run_id), 0)
    for key, payload in payloads.items():
        await redis.hset(key, mapping=pack(payload))
    given: list[tuple[list[MiniBatch], dict[str, SamplePayload]]] = []

    def train(plans: list[MiniBatch], own: dict[str, SamplePayload], **_: Any) -> Trained:
        given.append((plans, own))
        return Trained({}, ())

    lost = plan(batch)[0].shares[1][0].payload
    await redis.hset(lost, "response_ids", b"damaged")
    async with service_context(redis, run_id, recipe_document("/none"), "learner") as context:
        rank: Any = RankContext(context, 1, 2)
        rank.archive.prepare()
        rank.ranks = SimpleNamespace(all_reduce=torch.clone)  # rank 0 finds no damage
        rank.trainer = SimpleNamespace(plan=plan, train=train)
        # A rank that masked another sample would find the damaged one again and again.
        trained = await asyncio.wait_for(BatchTraining(rank).train(batch, WRITER), 30)
        archived = rank.archive.share(batch.step, 1, WRITER)
        rank.close()
    assert trained is not None
    assert [text.split()[1] for text in trained.damaged] == [lost]
    [(plans, own)] = given
    assert own.keys() == archived.keys() == {sample.payload for part in plans for sample in part.shares[1]}
    assert {sample.payload for part in plans for share in part.shares for sample in share} == payloads.keys() - {lost}
