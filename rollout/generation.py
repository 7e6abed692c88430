"""Owns the work on one task: drawing the samples its group still lacks and publishing each as it ends.

Must not read streams; the service hands in a leased task.
"""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
from numpy.typing import NDArray

from rollout.engine import Generation, RolloutEngine
from rollout.prompts import ChatTokenizer, PromptError
from services.cancellation import cancel_and_wait
from services.contracts import Cause, Lane, Sample, SampleFacts, Task
from services.metrics import MESSAGES, TOKENS
from services.process import Context
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import GroupTransitions, RefusedMessageError, missing_samples

log = logging.getLogger(__name__)

STRADDLE_TRIES = 3
MEMORY = "redis-memory"
FULL_PAUSE_S = 1.0


class StraddledError(RuntimeError):
    """At limits.max_staleness = 0 a response could not be drawn from one policy version alone."""


class GroupWorker:
    """Draws groups. Effect: per sample, the payload and an entry in the lane's samples stream, once."""

    def __init__(self, context: Context, engine: RolloutEngine, tokenizer: ChatTokenizer) -> None:
        self._context = context
        self._engine = engine
        self._tokenizer = tokenizer
        self._transitions = GroupTransitions(context.redis, context.keys, "rollout")
        self._fresh = context.record.recipe.limits.max_staleness == 0

    async def work(self, lane: Lane, consumer: Consumer[Task], delivery: Delivery[Task]) -> None:
        """Draw what the group lacks under the task's lease; acked with the group's last sample.

        A group that was released is acked without work. A prompt that cannot be answered, and a task that is not of
        this run, go to the dead-letter stream with the reason and the cause. When this raises, the task stays unacked
        and is delivered again.
        """
        task = delivery.message
        try:
            async with consumer.renewing(delivery.lease):
                await self._draw(lane, consumer, delivery)
        except PromptError as error:
            await consumer.dead_letter(delivery, str(error), error.cause)
            self._count(lane, "given-up")
        except RefusedMessageError as error:
            await consumer.dead_letter(delivery, str(error), Cause.INVALID)
            self._count(lane, "refused")
        except StraddledError as error:
            # Unacked: the lease lapses and the task is delivered again, at most limits.max_deliveries times.
            log.error("group %s is left to be delivered again: %s", task.group, error)
            self._count(lane, "straddled")
        else:
            self._count(lane, "done")

    def _count(self, lane: Lane, result: str) -> None:
        MESSAGES.labels(self._context.record.id, f"{lane.value}-tasks", result).inc()

    async def _draw(self, lane: Lane, consumer: Consumer[Task], delivery: Delivery[Task]) -> None:
        task = delivery.message
        missing = await missing_samples(self._context.redis, self._context.keys, task)
        if not missing:
            await consumer.ack(delivery.lease)
            return
        prompt_ids = self._tokenizer.prompt_ids(task.prompt)
        room = self._context.record.recipe.model.max_model_len - len(prompt_ids)
        if task.sampling.max_new_tokens > room:
            raise RefusedMessageError(
                f"sampling.max_new_tokens = {task.sampling.max_new_tokens} must not exceed {room}, what the prompt "
                "leaves of model.max_model_len"
            )
        samples = [asyncio.create_task(self._sample(lane, delivery, index, prompt_ids)) for index in missing]
        try:
            await asyncio.gather(*samples)
        finally:
            await cancel_and_wait(*samples)

    async def _sample(self, lane: Lane, delivery: Delivery[Task], index: int, prompt_ids: NDArray[np.int32]) -> None:
        generation, started_at = await self._generate(lane, delivery, index, prompt_ids)
        body = SamplePayload(
            prompt_ids, generation.response_ids, generation.behaviour_logprobs,
            self._tokenizer.text(generation.response_ids), generation.finish_reason, generation.spans,
        )  # fmt: skip
        task = delivery.message
        sample = Sample(
            group=task.group, index=index, verifier=task.prompt.verifier, reference=task.prompt.reference,
            facts=self._facts(task, index, body, started_at),
        )  # fmt: skip
        if await self._publish(lane, delivery, sample, body):
            TOKENS.labels(self._context.record.id).inc(len(generation.response_ids))

    async def _publish(self, lane: Lane, delivery: Delivery[Task], sample: Sample, body: SamplePayload) -> bool:
        """Publish, and wait for room in a full Redis; whether this sample was the first. Raises RedisFullError."""
        deadline_s = self._context.record.recipe.limits.stall_timeout_s
        ends = time.monotonic() + deadline_s
        while True:
            try:
                fresh = await self._transitions.publish_sample(
                    lane, delivery.lease, delivery.message.wanted, sample, body
                )
                self._context.waits.done(MEMORY)
                return fresh
            except RedisFullError as error:
                if time.monotonic() > ends:
                    raise
                self._context.waits.pending(MEMORY, f"room for samples: {error}", deadline_s)
                await asyncio.sleep(FULL_PAUSE_S)

    def _facts(self, task: Task, index: int, body: SamplePayload, started_at: float) -> SampleFacts:
        versions = [span.version for span in body.spans]
        return SampleFacts(
            payload=self._context.keys.payload(task.group, index), prompt_tokens=len(body.prompt_ids),
            response_tokens=len(body.response_ids), truncated=body.finish_reason == "length",
            mean_logprob=float(body.behaviour_logprobs.mean()), oldest_version=min(versions),
            newest_version=max(versions), started_at=started_at, finished_at=time.time(),
        )  # fmt: skip

    async def _generate(
        self, lane: Lane, delivery: Delivery[Task], index: int, prompt_ids: NDArray[np.int32]
    ) -> tuple[Generation, float]:
        """One response and when it was begun (Unix seconds); of one version when the run must be on-policy.

        Raises StraddledError after three tries.
        """
        task = delivery.message
        seed = None if task.sampling.seed is None else task.sampling.seed + index
        for attempt in range(STRADDLE_TRIES):
            # The lease's entry and delivery keep ids apart when a group comes back while an old request still runs.
            request = f"{task.group}/{index}/{delivery.lease.entry}/{delivery.deliveries}/{attempt}"
            started_at = time.time()
            generation = await self._engine.generate(prompt_ids.tolist(), task.sampling, request, seed)
            if lane is not Lane.TRAIN or not self._fresh or len(generation.spans) == 1:
                return generation, started_at
            log.info("sample %d of group %s straddles a weight sync; drawn again", index, task.group)
        raise StraddledError(f"sample {index} straddled a weight sync {STRADDLE_TRIES} times in a row")
