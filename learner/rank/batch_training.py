"""Owns how one rank trains its share of a batch: fetch the payloads, agree on damaged ones, archive, train.

Must not read a stream, nor commit a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from learner.rank.context import RankContext
from learner.recovery.start import archived_payloads, batch_digest
from learner.training.minibatches import masked
from learner.training.results import Trained
from learner.training.trainer import InterruptedTrainingError
from services.contracts import Batch, Fence
from services.streams.delivery.payloads import SamplePayload, fetch

log = logging.getLogger(__name__)


class NonFiniteGradientError(RuntimeError):
    """Too many consecutive optimizer steps had a non-finite gradient."""


class BatchTraining:
    """The training of one rank."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank

    async def train(
        self,
        batch: Batch,
        fence: Fence,
        version: int | None = None,
        *,
        learning_rate: float | None = None,
        archived: bool = False,
        before_update: Callable[[], None] | None = None,
    ) -> Trained | None:
        """Train one rollout step. None if `stopping` was set meanwhile and interrupted it. Collective.

        `fence`: the learner under whose name the batch is archived. `version`, `learning_rate`, `before_update`: see
        `Trainer.train`.
        With `archived` the payloads come from the archive, where that learner wrote them when it trained the step
        first.
        """
        steps = partial(
            self._rank.trainer.train, version=version, learning_rate=learning_rate, before_update=before_update
        )
        work = asyncio.ensure_future(self._train(batch, fence, steps, archived))
        stopping = asyncio.create_task(self._rank.service.stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                self._rank.trainer.interrupt(self._rank.service.grace_s())
            return await work
        except InterruptedTrainingError:
            log.info("stopping: the batch stays in the stream for the next learner")
            return None
        finally:
            stopping.cancel()

    async def _train(self, batch: Batch, fence: Fence, steps: Callable[..., Trained], archived: bool) -> Trained:
        trainer = self._rank.trainer
        damaged: dict[str, str] = {}
        while True:
            plans = trainer.plan(batch)
            keys = [sample.payload for plan in plans for sample in plan.shares[self._rank.rank]]
            payloads, found, error = await self._payloads(batch, keys, fence if archived else None)
            unusable = await self._exchange(batch, found, error)
            if not unusable:
                break
            # What one rank cannot train, all ranks mask, so that they agree on the weight of every token.
            damaged |= {key: found.get(key, f"payload {key} is damaged") for key in unusable}
            batch = masked(batch, unusable)
        error = None if archived else await self._archive(batch, payloads, fence)
        await self._exchange(batch, {}, error)
        trained = await self._rank.in_order(lambda: steps(plans, payloads))
        return replace(trained, damaged=tuple(damaged.values()), batch_digest=batch_digest(batch))

    async def _payloads(
        self, batch: Batch, keys: list[str], archived_by: Fence | None
    ) -> tuple[dict[str, SamplePayload], dict[str, str], Exception | None]:
        """The payloads of this rank's share: (intact ones, the reasons why others are damaged, any other error)."""
        try:
            if archived_by:
                what = f"the archived batch of rollout step {batch.step}"
                found = await self._rank.retry_storage(
                    partial(archived_payloads, self._rank.archive, batch, archived_by), what
                )
                return {key: found[key] for key in keys}, {}, None
            intact, damaged = await fetch(self._rank.service.redis, keys)
            damaged |= self._without_nuclei(intact)
        except Exception as error:  # noqa: BLE001 - reported to the other ranks first, then raised
            return {}, {}, error
        return intact, damaged, None

    def _without_nuclei(self, payloads: dict[str, SamplePayload]) -> dict[str, str]:
        """Remove payloads that lack their nuclei in a run with top-k. Returns the reasons, by key."""
        top_k = self._rank.service.record.recipe.rollout.top_k
        lacking = [key for key, payload in payloads.items() if top_k is not None and payload.nuclei is None]
        for key in lacking:
            del payloads[key]
        return {key: f"payload {key} has no nuclei: expected those of rollout.top_k = {top_k}" for key in lacking}

    async def _exchange(self, batch: Batch, damaged: Mapping[str, str], error: Exception | None) -> list[str]:
        """The payloads that any rank found damaged. Collective. Raises `error`, or RuntimeError if other ranks failed.

        If one rank failed without this exchange, the others would wait for it until the timeout of the group.
        """
        keys = [sample.payload for group in batch.groups for sample in group.samples]
        flags = torch.tensor([int(error is not None), *(int(key in damaged) for key in keys)])
        failures, *found = (await self._rank.in_order(lambda: self._rank.ranks.all_reduce(flags))).tolist()
        if error:
            raise error
        if failures:
            raise RuntimeError(f"{failures} other ranks could not fetch or archive their share of step {batch.step}")
        return [key for key, count in zip(keys, found, strict=True) if count]

    async def _archive(self, batch: Batch, payloads: dict[str, SamplePayload], fence: Fence) -> Exception | None:
        """Archive the batch and this rank's share before training, so that it can be replayed. Returns the error."""
        try:
            write = partial(self._write_archive, batch, payloads, fence)
            await self._rank.retry_storage(write, f"the batch of rollout step {batch.step}")
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None

    def _write_archive(self, batch: Batch, payloads: dict[str, SamplePayload], fence: Fence) -> None:
        archive, rank = self._rank.archive, self._rank.rank
        archive.write_share(batch, rank, payloads, fence)
        if rank == 0:
            archive.write_batch(batch, fence)
        elif archive.mirror.remote:
            archive.share_path(batch.step, rank, fence).unlink()  # only rank 0 cleans the scratch space of its node

    @property
    def non_finite_in_a_row(self) -> int:
        """Consecutive optimizer steps with a non-finite gradient so far, across rollout steps."""
        return self._rank.trainer.non_finite_in_a_row

    def check_gradients(self, step: int, fence: Fence) -> None:
        """Raise NonFiniteGradientError, on every rank, if consecutive non-finite steps reached the limit."""
        limit, archive = self._rank.settings.max_non_finite_steps, self._rank.archive
        if self.non_finite_in_a_row < limit:
            return
        run = self._rank.service.record.id
        raise NonFiniteGradientError(
            f"{limit} consecutive optimizer steps had a non-finite gradient (learner.max_non_finite_steps), the last "
            f"one in rollout step {step}; its batch is {archive.batch_path(step, fence)}; "
            f"`penstock replay {run} {step} --runs {archive.folder.parent}` replays it"
        )
