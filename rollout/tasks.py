"""Owns a leased task and the work on it: publishing the samples that its group lacks, then an ack or a dead letter.

What previous replicas drew of its responses is gone on from; what this one has drawn when it is asked to end is kept.

Must not read streams (rollout/service.py hands in the leased task) or generate (rollout/generation.py does).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.generation import MixedVersionError, ResponseGenerator, ResponseRequest
from rollout.half_drawn import Keeper, WatchedTask
from rollout.prompts import PromptError
from services.contracts import Cause, DropReason, Lane, Sample, SampleFacts, Task, TaskResult
from services.metrics import DROPPED_TOKENS, KEPT_TOKENS, MESSAGES, TOKENS
from services.process.hosting import Context
from services.retry import Retry
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease, LeaseLostError
from services.streams.delivery.partials import (
    NotKeptError,
    Partial,
    Piece,
    forget_partials,
    keep_partials,
    read_partials,
)
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import (
    Effect,
    GroupTransitions,
    RejectedMessageError,
    missing_samples,
    rejection,
)
from services.streams.state.policy_history import read_policy
from services.waits import REDIS_MEMORY, cancel_and_wait

log = logging.getLogger(__name__)

R = TypeVar("R")

FULL_PAUSE_S = 1.0
REPEATED_REFERENCE = 2048
"""Characters, as JSON: a larger reference is not repeated with each response of its group."""
PUBLISHED_TOGETHER = 16
"""The most samples per call: Redis serves no other client while it stores them."""
MOMENT_S = 1.0
"""How long responses may still end by themselves when the replica is asked to end."""


class ReplicaEndsError(RuntimeError):
    """The replica was asked to end; what it has drawn is kept, and others go on."""


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
    work: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """A name of its own for this work on the task: two deliveries may have the same number."""

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

    @property
    def one_version(self) -> bool:
        """Whether all tokens of a response must be of one version: an on-policy run trains on no other samples."""
        return self.context.record.recipe.limits.max_staleness == 0 and self.lane is Lane.TRAIN

    def request(self, index: int, prompt_ids: NDArray[np.int32], kept: Partial | None = None) -> ResponseRequest:
        """The request to the generator for sample `index`, of which `kept` was drawn before."""
        task, sampling = self.message, self.message.sampling
        return ResponseRequest(
            # Entry and work keep names apart when the group is redelivered while an old request still runs.
            name=f"{task.group}/{index}/{self.delivery.lease.entry}/{self.work}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=None if sampling.seed is None else sampling.seed + index,
            one_version=self.one_version,
            kept=kept,
        )

    async def keep(self, prompt_ids: NDArray[np.int32], pieces: list[Piece]) -> list[int]:
        """Keep pieces of half-drawn responses; how many tokens of each sample are kept now. Raises NotKeptError."""
        context, most = self.context, self.context.record.recipe.limits.max_deliveries
        if context.waits.is_open(REDIS_MEMORY):
            raise NotKeptError("Redis is full, and whole responses wait for room")
        return await keep_partials(
            context.redis, context.keys, self.delivery.lease, self.message.group, pieces, prompt_ids, most
        )

    async def kept(self, prompt_ids: NDArray[np.int32], held: int | None) -> dict[int, Partial]:
        """What previous replicas drew of this task's responses and may be gone on from, by sample index.

        `held`: the policy version that this replica holds. A seed's draw is repeated from its first token.
        """
        if self.message.sampling.seed is not None:
            return {}
        context, group = self.context, self.message.group
        found, damaged = await read_partials(context.redis, context.keys, group, self.delivery.lease.entry, prompt_ids)
        for damage in damaged.values():
            await context.event_log.write("partial-damaged", f"{damage}; it is drawn again")
        if not found:
            return {}
        oldest = await self._oldest_version()
        usable = {}
        for index, drawn in found.items():
            if reason := self._drop_reason(drawn, held, oldest):
                DROPPED_TOKENS.labels(context.record.id, reason).inc(len(drawn.tokens))
            else:
                usable[index] = drawn
        KEPT_TOKENS.labels(context.record.id).inc(sum(len(drawn.tokens) for drawn in usable.values()))
        return usable

    def _drop_reason(self, drawn: Partial, held: int | None, oldest: int) -> DropReason | None:
        tokens, sampling = drawn.tokens, self.message.sampling
        if len(tokens) > sampling.max_new_tokens or (tokens.nuclei is None) != (sampling.top_k is None):
            return DropReason.DAMAGED
        versions = {span.version for span in tokens.spans}
        if self.one_version and versions != {held}:
            return DropReason.VERSION
        return DropReason.STALE if min(versions) < oldest else None

    async def _oldest_version(self) -> int:
        """The oldest policy version of which the next batch may still use a token; 0 if no limit is known."""
        policy = await read_policy(self.context.redis, self.context.keys) if self.lane is Lane.TRAIN else None
        if policy is None or not policy.version_steps:
            return 0
        least = policy.step - self.context.record.recipe.limits.max_staleness
        return min((version for version, step in policy.version_steps.items() if step >= least), default=0)

    def sample(self, index: int, payload: SamplePayload, started_at: float, *, alone: bool = True) -> Sample:
        """The message that announces sample `index`, whose generation started at `started_at` (Unix seconds).

        `alone`: this replica has drawn all of its tokens.
        """
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
            replica=self.context.heartbeat.info.id if alone else "",
        )
        large = self._has_large_reference
        return Sample(
            group=task.group,
            index=index,
            verifier=task.prompt.verifier,
            reference={} if large else task.prompt.reference,
            reference_in_task=large,
            facts=facts,
        )

    @cached_property
    def _has_large_reference(self) -> bool:
        return len(json.dumps(self.message.prompt.reference)) > REPEATED_REFERENCE

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
            effects = await full.run_async(lambda: self._publish_once(samples))
        finally:
            waits.done(REDIS_MEMORY)
        tokens = 0
        for effect, (sample, _) in zip(effects, samples, strict=True):
            if reason := rejection(effect, sample.group, sample.index):
                raise RejectedMessageError(reason)
            tokens += sample.facts.response_tokens if effect == Effect.FRESH else 0
        TOKENS.labels(self.context.record.id).inc(tokens)

    async def _publish_once(self, samples: Sequence[tuple[Sample, SamplePayload]]) -> list[int]:
        """The effects of publishing samples. In a full Redis, their pieces make room for them first."""
        lease, wanted = self.delivery.lease, self.message.wanted
        try:
            return await self.transitions.publish_samples(self.lane, lease, wanted, samples)
        except RedisFullError:
            context, indices = self.context, [sample.index for sample, _ in samples]
            await forget_partials(context.redis, context.keys, lease, self.message.group, indices)
            return await self.transitions.publish_samples(self.lane, lease, wanted, samples)

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

    async def give_back(self) -> None:
        """Return the task, so that others take it at once; unless the lease was lost."""
        await self.consumer.give_back(self.delivery.lease)

    async def dead_letter(self, reason: str, cause: Cause) -> None:
        """Move the task to the dead-letter stream."""
        await self.consumer.dead_letter(self.delivery, reason, cause)

    def count(self, result: TaskResult) -> None:
        """Count the task by its result."""
        MESSAGES.labels(self.context.record.id, f"{self.lane.value}-tasks", result).inc()


class GroupWorker:
    """Works on leased tasks. Effect: the payload of each sample and its entry in the lane's samples stream, once.

    `progressed`: set whenever samples were published, and when a work ends; never cleared here.
    """

    def __init__(self, generator: ResponseGenerator) -> None:
        self._generator = generator
        self._keeper = Keeper(generator.half_drawn)
        self._ending = asyncio.Event()
        self._unfinished: dict[str, int] = {}
        self.progressed = asyncio.Event()

    def unfinished(self, task: LeasedTask) -> int:
        """How many of the task's samples are not published yet; all that it requests, until its work has begun.

        Responses that wait for room in Redis count, so that a replica does not go on to draw more of them.
        """
        return self._unfinished.get(task.work, task.message.wanted)

    async def keep(self) -> None:
        """Keep what the responses have so far, from time to time, until cancelled."""
        await self._keeper.run()

    def end(self) -> None:
        """Return all tasks soon: what was drawn of their responses is kept, for other replicas to go on from."""
        self._ending.set()

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
            # Not acked: the lease expires and the task is redelivered, at most limits.max_deliveries times, and those
            # times that a delivery brings it further (services/streams/delivery/partials.py: FORGIVEN).
            log.error("group %s is left for redelivery: %s", task.message.group, error)
            task.count(TaskResult.MIXED_VERSION)
        except ReplicaEndsError as error:
            log.info("group %s is returned: %s", task.message.group, error)
            await task.give_back()
            task.count(TaskResult.RETURNED)
        else:
            task.count(TaskResult.DONE)
        finally:
            self._unfinished.pop(task.work, None)
            self.progressed.set()

    def _progress(self, task: LeasedTask, unfinished: int) -> None:
        self._unfinished[task.work] = unfinished
        self.progressed.set()

    async def _publish_missing(self, task: LeasedTask) -> Sequence[tuple[Sample, SamplePayload]]:
        """Publish the samples that the group lacks, except the last ones, which it returns; none if it lacks none."""
        missing = await task.missing_samples()
        self._progress(task, len(missing))
        if not missing:
            return ()
        prompt_ids = self._generator.encoded_prompt(task.message)
        kept = await task.kept(prompt_ids, self._generator.version)
        requests = {index: task.request(index, prompt_ids, kept.get(index)) for index in missing}
        names = {} if task.message.sampling.seed is not None else {at: each.name for at, each in requests.items()}
        responses = {asyncio.create_task(self._sample(task, *each)) for each in requests.items()}
        ending = asyncio.create_task(self._ending.wait())
        try:
            with self._keeper.watching(names, partial(task.keep, prompt_ids)) as watched:
                while True:
                    await asyncio.wait({*responses, ending}, return_when=asyncio.FIRST_COMPLETED)
                    done = (await self._keep_drawn(watched, responses)) if ending.done() else _done(responses)
                    responses -= done
                    failed = [response for response in done if response.exception()]
                    samples = [response.result() for response in done - set(failed)]
                    samples.sort(key=lambda sample: sample[0].index)
                    if not responses and not failed:
                        return samples
                    await task.publish_samples(samples)
                    self._progress(task, len(responses))
                    for response in failed:
                        response.result()
                    if ending.done():
                        raise ReplicaEndsError(f"{len(responses)} responses are half-drawn")
        finally:
            await cancel_and_wait(ending, *responses)

    async def _keep_drawn(
        self, watched: WatchedTask, responses: set[asyncio.Task[tuple[Sample, SamplePayload]]]
    ) -> set[asyncio.Task[tuple[Sample, SamplePayload]]]:
        """Keep what the responses have at once, and what they have after a moment. Returns those that ended in it.

        One that ends later, while Redis stores what is kept, counts as half-drawn: short ones would be preferred.
        """
        await watched.keep()
        await asyncio.wait(responses, timeout=MOMENT_S)
        done = _done(responses)
        await watched.keep()
        return done

    async def _sample(self, task: LeasedTask, index: int, request: ResponseRequest) -> tuple[Sample, SamplePayload]:
        payload, started_at = await self._generator.generate(request)
        return task.sample(index, payload, started_at, alone=request.kept is None), payload


def _done(responses: set[asyncio.Task[R]]) -> set[asyncio.Task[R]]:
    return {response for response in responses if response.done()}
