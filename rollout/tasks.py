"""Owns a leased task and the work on it: publishing the samples that its group lacks, then an ack or a dead letter.

Must not read streams (rollout/service.py hands in the leased task) or generate (rollout/generation.py does).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.generation import MixedVersionError, ResponseGenerator, ResponseRequest
from rollout.prompts import PromptError
from services.contracts import Cause, Lane, Sample, SampleFacts, Task, TaskResult
from services.metrics import MESSAGES, TOKENS
from services.process import Context
from services.retry import Retry
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease, LeaseLostError
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import (
    Effect,
    GroupTransitions,
    RejectedMessageError,
    missing_samples,
    rejection,
)
from services.waits import REDIS_MEMORY, cancel_and_wait

log = logging.getLogger(__name__)

FULL_PAUSE_S = 1.0
REPEATED_REFERENCE = 2048
"""Characters, as JSON: a larger reference is not repeated with each response of its group."""
PUBLISHED_TOGETHER = 16
"""The most samples per call: Redis serves no other client while it stores them."""


@dataclass(frozen=True)
class LeasedTask:
    """A task under lease: what it requests, and every effect it may have on the streams.

    The group's last sample acks it. If it is neither acked nor dead-lettered, it is redelivered when the lease expires.
    """

    context: Context
    lane: Lane
    consumer: Consumer[Task]
    transitions: GroupTransitions
    delivery: Delivery[Task]

    @property
    def message(self) -> Task:
        """What the sampler requests."""
        return self.delivery.message

    def renewing(self) -> AbstractAsyncContextManager[None]:
        """Keep the lease while the body runs; see Consumer.renewing."""
        return self.consumer.renewing(self.delivery.lease)

    async def missing_samples(self) -> list[int]:
        """The indices of the samples that are not published yet; empty when the group was released.

        Raises RejectedMessageError for a group that this run does not have, or that has fewer samples.
        """
        return await missing_samples(self.context.redis, self.context.keys, self.message)

    def request(self, index: int, prompt_ids: NDArray[np.int32]) -> ResponseRequest:
        """The request to the generator for sample `index`; an on-policy run trains on samples of one version only."""
        task, sampling = self.message, self.message.sampling
        on_policy = self.context.record.recipe.limits.max_staleness == 0
        return ResponseRequest(
            # Entry and delivery keep names apart when the group is redelivered while an old request still runs.
            name=f"{task.group}/{index}/{self.delivery.lease.entry}/{self.delivery.deliveries}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=None if sampling.seed is None else sampling.seed + index,
            one_version=on_policy and self.lane is Lane.TRAIN,
        )

    def sample(self, index: int, payload: SamplePayload, started_at: float) -> Sample:
        """The message that announces sample `index`, whose generation started at `started_at` (Unix seconds)."""
        task, versions = self.message, [span.version for span in payload.spans]
        facts = SampleFacts(
            payload=self.context.keys.payload(task.group, index),
            prompt_tokens=len(payload.prompt_ids),
            response_tokens=len(payload.response_ids),
            truncated=payload.finish_reason == "length",
            mean_logprob=float(payload.behaviour_logprobs.sum()) / len(payload.behaviour_logprobs),
            oldest_version=min(versions),
            newest_version=max(versions),
            started_at=started_at,
            finished_at=time.time(),
            replica=self.context.heartbeat.info.id,
        )
        prompt = task.prompt
        large = len(json.dumps(prompt.reference)) > REPEATED_REFERENCE
        return Sample(
            group=task.group,
            index=index,
            verifier=prompt.verifier,
            reference={} if large else prompt.reference,
            reference_in_task=large,
            facts=facts,
        )

    async def publish_samples(
        self, samples: Sequence[tuple[Sample, SamplePayload]], lost: Collection[Lease] = ()
    ) -> None:
        """Publish samples, each unless it was published before; while Redis is full, wait for room.

        Raises RejectedMessageError for a group that this run does not have, RedisFullError after
        limits.stall_timeout_s, or once the lease is among those that were `lost`.
        """
        for start in range(0, len(samples), PUBLISHED_TOGETHER):
            await self._publish_together(samples[start : start + PUBLISHED_TOGETHER], lost)

    async def _publish_together(self, samples: Sequence[tuple[Sample, SamplePayload]], lost: Collection[Lease]) -> None:
        waits, deadline_s = self.context.waits, self.context.record.recipe.limits.stall_timeout_s

        def report(error: Exception) -> None:
            waits.pending(REDIS_MEMORY, f"room for samples: {error}", deadline_s)

        def passes(error: Exception) -> bool:
            return isinstance(error, RedisFullError) and self.delivery.lease not in lost

        full = Retry(passes, FULL_PAUSE_S, deadline_s, on_failure=report)
        try:
            effects = await full.run_async(
                lambda: self.transitions.publish_samples(self.lane, self.delivery.lease, self.message.wanted, samples)
            )
        finally:
            waits.done(REDIS_MEMORY)
        tokens = 0
        for effect, (sample, _) in zip(effects, samples, strict=True):
            if reason := rejection(effect, sample.group, sample.index):
                raise RejectedMessageError(reason)
            tokens += sample.facts.response_tokens if effect == Effect.FRESH else 0
        TOKENS.labels(self.context.record.id).inc(tokens)

    async def finish(self, last: Sequence[tuple[Sample, SamplePayload]]) -> None:
        """Publish the last samples of the task's group, or ack a task whose group lacks none.

        Either acks the task, so that its lease may be gone before the reply: unlike in `renewing`, that ends nothing.
        Raises what `publish_samples` raises, and LeaseLostError if the lease is lost while Redis has no room.
        """
        lease = self.delivery.lease
        with self.consumer.watching([lease]) as lost:
            try:
                await self.publish_samples(last, lost)
            except RedisFullError:
                if lease in lost:
                    raise LeaseLostError(f"the lease of {lease.entry} on {lease.stream} was lost") from None
                raise
            if not last:
                await self.consumer.ack(lease)

    async def dead_letter(self, reason: str, cause: Cause) -> None:
        """Move the task to the dead-letter stream."""
        await self.consumer.dead_letter(self.delivery, reason, cause)

    def count(self, result: TaskResult) -> None:
        """Count the task by its result."""
        MESSAGES.labels(self.context.record.id, f"{self.lane.value}-tasks", result).inc()


class GroupWorker:
    """Works on leased tasks. Effect: the payload of each sample and its entry in the lane's samples stream, once."""

    def __init__(self, generator: ResponseGenerator) -> None:
        self._generator = generator

    async def work(self, task: LeasedTask) -> None:
        """Publish the samples that the task's group lacks.

        A task of a released group is acked without work. A prompt that cannot be answered, and a task that is not of
        this run, are dead-lettered with reason and cause. The work stops when the lease is lost. When this raises, the
        task stays unacked and is redelivered.
        """
        try:
            async with task.renewing():
                last = await self._publish_missing(task)
            await task.finish(last)
        except PromptError as error:
            await task.dead_letter(str(error), error.cause)
            task.count(TaskResult.DEAD_LETTERED)
        except RejectedMessageError as error:
            await task.dead_letter(str(error), Cause.INVALID)
            task.count(TaskResult.REFUSED)
        except LeaseLostError as error:
            log.warning("the generation of group %s was stopped: %s", task.message.group, error)
            task.count(TaskResult.LEASE_LOST)
        except MixedVersionError as error:
            # Not acked: the lease expires and the task is redelivered, at most limits.max_deliveries times.
            log.error("group %s is left for redelivery: %s", task.message.group, error)
            task.count(TaskResult.MIXED_VERSION)
        else:
            task.count(TaskResult.DONE)

    async def _publish_missing(self, task: LeasedTask) -> Sequence[tuple[Sample, SamplePayload]]:
        """Publish the samples that the group lacks, except the last ones, which it returns; none if it lacks none."""
        missing = await task.missing_samples()
        if not missing:
            return ()
        prompt_ids = self._generator.encoded_prompt(task.message)
        responses = {asyncio.create_task(self._sample(task, index, prompt_ids)) for index in missing}
        try:
            while True:
                done, responses = await asyncio.wait(responses, return_when=asyncio.FIRST_COMPLETED)
                failed = [response for response in done if response.exception()]
                samples = [response.result() for response in done - set(failed)]
                samples.sort(key=lambda sample: sample[0].index)
                if not responses and not failed:
                    return samples
                await task.publish_samples(samples)
                for response in failed:
                    response.result()
        finally:
            await cancel_and_wait(*responses)

    async def _sample(
        self, task: LeasedTask, index: int, prompt_ids: NDArray[np.int32]
    ) -> tuple[Sample, SamplePayload]:
        payload, started_at = await self._generator.generate(task.request(index, prompt_ids))
        return task.sample(index, payload, started_at), payload
