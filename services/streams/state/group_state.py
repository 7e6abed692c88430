"""Owns the transitions of a run's groups: each is one call of a Redis function that also acks its input.

Must not decide anything: callers decide, and each decision takes effect exactly once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import IntEnum
from typing import TypeVar

from services.contracts import (
    Batch,
    Cause,
    EvaluationRecord,
    Event,
    Lane,
    Release,
    Sample,
    SamplerSnapshot,
    SamplerState,
    Task,
    Verdict,
)
from services.streams.connection.client import Redis
from services.streams.connection.functions import call, call_for_each
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease
from services.streams.delivery.payloads import SamplePayload, pack
from services.streams.delivery.snapshots import compress_snapshot
from services.streams.keys import STREAM_READERS, RunKeys
from services.streams.retention import EVENTS_KEPT, RELEASED_KEPT
from services.streams.state.ownership import RoleOwner

TASKS_AT_ONCE = 64
"""The most tasks of one dispatch, so that Redis is not held for long."""
FIELDS_AT_ONCE, HASHES_AT_ONCE = 256, 64
"""Groups per round trip: of a few fields each, or of whole hashes."""
EVALUATED_TTL_S = 7 * 24 * 3600
"""A resumed evaluation must still find which of its groups were answered, however long it takes."""
PENDING, KEPT, BATCHED, REOPENED = "pending", "kept", "batched", "reopened"
"""States of a group that has not ended. A reopened one waits to be dispatched again, after a rewind or a withdrawal."""
MORE, EVALUATED = "more", "evaluated"
"""Decisions about a pending group other than a release: draw its other samples, keep it for a batch, or end its
evaluation."""


M = TypeVar("M", Sample, Verdict)


class Effect(IntEnum):
    """The result of an effect on a group, as in lua/shared.lua."""

    FRESH = 1
    LATE = 0
    UNKNOWN_GROUP = -1
    OUTSIDE_GROUP = -2


class RejectedMessageError(ValueError):
    """A valid message that does not belong to this run; the text says why."""


def rejection(effect: int, group: str, index: int) -> str | None:
    """Why a message on a sample does not belong to this run, or None if it does."""
    if effect == Effect.UNKNOWN_GROUP:
        return f"group {group!r} is not a group of this run"
    if effect == Effect.OUTSIDE_GROUP:
        return f"index {index} is not a sample of group {group!r}"
    return None


class GroupTransitions(RoleOwner):
    """All effects of services on a run's groups."""

    async def dispatch(self, lane: Lane, tasks: Sequence[Task], state: SamplerState | None) -> bool:
        """Publish tasks, and count their groups as dispatched, all or none. A reopened group counts already.

        False if all of them had been dispatched before. Raises RedisFullError when Redis is at its maxmemory,
        FencedError.
        """
        streams = self._keys.lane(lane)
        dispatched = await self._call(
            "dispatch",
            tasks_key=streams.tasks,
            counters_key=streams.counters,
            pending_key=streams.pending,
            sampler_state_key=self._keys.sampler_state,
            group_keys=[self._keys.group(task.group) for task in tasks],
            sampler_state=state.model_dump_json() if state else "",
            group_list=[task.group for task in tasks],
            task_list=[task.model_dump_json() for task in tasks],
            samples_list=[task.samples for task in tasks],
        )
        return bool(dispatched)

    async def publish_samples(
        self, lane: Lane, lease: Lease, wanted: int, samples: Sequence[tuple[Sample, SamplePayload]]
    ) -> list[int]:
        """Store payloads of one group and announce their samples; ack the task once `wanted` samples exist.

        Returns the Effect of each. Raises RedisFullError.
        """
        streams, group = self._keys.lane(lane), samples[0][0].group
        return await call_for_each(
            self._redis,
            "publish_samples",
            group_key=self._keys.group(group),
            samples_key=streams.samples,
            tasks_key=streams.tasks,
            counters_key=streams.counters,
            in_flight_key=streams.tokens_in_flight,
            partials_key=self._keys.partials(group),
            payload_keys=[sample.facts.payload for sample, _ in samples],
            consumer_group=lease.consumer_group,
            group=group,
            task_entry=lease.entry,
            wanted=wanted,
            index_list=[sample.index for sample, _ in samples],
            sample_list=[sample.model_dump_json() for sample, _ in samples],
            token_count_list=[sample.facts.response_tokens for sample, _ in samples],
            payload_field_list=[part for _, body in samples for field in pack(body).items() for part in field],
        )

    async def publish_verdicts(self, lane: Lane, verdicts: Sequence[tuple[Lease, Verdict]]) -> list[int]:
        """Announce verdicts on one group's samples and ack the samples. Returns the Effect of each."""
        streams, (lease, verdict) = self._keys.lane(lane), verdicts[0]
        return await call_for_each(
            self._redis,
            "publish_verdicts",
            group_key=self._keys.group(verdict.group),
            verdicts_key=streams.verdicts,
            samples_key=streams.samples,
            consumer_group=lease.consumer_group,
            sample_entry_list=[lease.entry for lease, _ in verdicts],
            index_list=[verdict.index for _, verdict in verdicts],
            verdict_list=[verdict.model_dump_json() for _, verdict in verdicts],
        )

    async def record_verdicts(
        self,
        lane: Lane,
        group: str,
        verdicts: Sequence[tuple[Lease, Verdict]],
        decision: str,
        *,
        rest: Task | None = None,
        posterior: tuple[str, str] = ("", ""),
        result: str = "",
    ) -> list[int]:
        """Record verdicts of one group and ack them; `decision` is '' unless the last decides.

        Without verdicts it decides a group whose verdicts are all recorded. It is MORE, KEPT, EVALUATED or a release.
        `rest`: with MORE, the task for the group's other samples. `posterior`: the prompt's pass rates after the
        decided group, as (prompt id, value). `result`: with EVALUATED, what Redis keeps of the group in place of its
        task and verdicts. Returns the Effect of each verdict; the one that decides has an effect even if it was
        recorded before. Raises FencedError.
        """
        streams, (prompt, value) = self._keys.lane(lane), posterior
        return await call_for_each(
            self._redis,
            "record_verdicts",
            epoch_key=self._epoch_key,
            group_key=self._keys.group(group),
            verdicts_key=streams.verdicts,
            counters_key=streams.counters,
            pending_key=streams.pending,
            unarchived_key=streams.unarchived,
            tasks_key=streams.tasks,
            posteriors_key=self._keys.posteriors,
            in_flight_key=streams.tokens_in_flight,
            partials_key=self._keys.partials(group),
            fence=self.fence.token,
            consumer_group=verdicts[0][0].consumer_group if verdicts else "",
            group=group,
            decision=decision,
            rest_task=rest.model_dump_json() if rest else "",
            prompt=prompt,
            posterior=value,
            result=result,
            verdict_entry_list=[lease.entry for lease, _ in verdicts],
            index_list=[verdict.index for _, verdict in verdicts],
            verdict_list=[verdict.model_dump_json() for _, verdict in verdicts],
            token_count_list=[verdict.facts.response_tokens for _, verdict in verdicts],
        )

    async def release(self, lane: Lane, group: str, release: Release, samples: int, reason: str = "") -> bool:
        """End a pending or kept group without training it, for a reason. False if it had ended or was batched.

        `samples`: how many it may have, if Redis lost its hash.
        """
        streams = self._keys.lane(lane)
        released = await self._call(
            "release",
            group_key=self._keys.group(group),
            counters_key=streams.counters,
            pending_key=streams.pending,
            unarchived_key=streams.unarchived,
            in_flight_key=streams.tokens_in_flight,
            partials_key=self._keys.partials(group),
            group=group,
            release=release.value,
            samples=samples,
            reason=reason,
        )
        return bool(released)

    async def withdraw(self, lane: Lane, group: str, samples: int) -> bool:
        """Reopen a pending group: it waits to be dispatched again, and none of its messages has an effect any more.

        It still counts as dispatched and pending. False if it is not pending, or an older release dispatched it. Raises
        FencedError.
        """
        streams = self._keys.lane(lane)
        withdrawn = await self._call(
            "withdraw",
            group_key=self._keys.group(group),
            tasks_key=streams.tasks,
            samples_key=streams.samples,
            verdicts_key=streams.verdicts,
            counters_key=streams.counters,
            in_flight_key=streams.tokens_in_flight,
            made_keys=self._keys.made(group, samples),
            group=group,
            reader_list=[STREAM_READERS[name] for name in ("tasks", "samples", "verdicts")],
        )
        return bool(withdrawn)

    async def publish_batch(self, batch: Batch, snapshot: SamplerSnapshot) -> bool:
        """Publish a batch of kept groups with the sampler's snapshot. False if one of the groups is not kept."""
        published = await self._call(
            "publish_batch",
            batches_key=self._keys.batches,
            sampler_state_key=self._keys.sampler_state,
            snapshot_key=self._keys.snapshot(batch.step),
            queue_key=self._keys.queue,
            counters_key=self._keys.lane(Lane.TRAIN).counters,
            group_keys=[self._keys.group(group.group) for group in batch.groups],
            step=batch.step,
            batch=batch.model_dump_json(),
            sampler_state=batch.sampler_state.model_dump_json(),
            snapshot=compress_snapshot(snapshot),
            last=int(batch.last),
        )
        return bool(published)

    async def reclaim_batch(self, step: int, entry: str, batches: Mapping[int, Sequence[str]]) -> bool:
        """Keep the groups of rollout step `step` and of later ones again, because the batch's `entry` is gone.

        `entry`: "" if the publication itself was lost. `batches`: the groups by step; without `step` if its commit was
        lost too. An event reports it. False, and nothing is changed, if the entry exists or the step was trained
        meanwhile. Raises FencedError.
        """
        groups = [group for batch in batches.values() for group in batch]
        lost, kept = f"the {'entry' if entry else 'publication'} of the batch of step {step}", f"{len(groups)} groups"
        if step not in batches:
            lost, kept = f"the commit of step {step} and {lost}", f"its groups and {len(groups)} of later steps"
        steps = ", ".join(f"step {each}" for each in sorted({step, *batches}))
        text = f"{steps}: Redis lost {lost}; {kept} are kept, to be published again"
        event = Event(service="sampler", phase="batch-lost", text=text, at=time.time())
        reclaimed = await self._call(
            "reclaim_batch",
            policy_key=self._keys.policy,
            batches_key=self._keys.batches,
            queue_key=self._keys.queue,
            events_key=self._keys.events,
            group_keys=[self._keys.group(group) for group in groups],
            step=step,
            lost_entry=entry,
            event=event.model_dump_json(),
            events_kept=EVENTS_KEPT,
        )
        return bool(reclaimed)

    async def mark_starved(self, why: str) -> None:
        """Record that the run has to pause, for lack of kept groups or of verdicts. Raises FencedError."""
        await self._call(
            "mark_starved",
            starved_key=self._keys.starved,
            queue_key=self._keys.queue,
            counters_key=self._keys.lane(Lane.TRAIN).counters,
            reason=why,
        )

    async def record_evaluation(self, record: EvaluationRecord) -> None:
        """Append the record of an evaluation to those of the run. Raises FencedError."""
        message = record.model_dump_json()
        await self._call("append_fenced", stream_key=self._keys.evaluations, message=message, kept=0)

    async def delete_evaluated(self, groups: list[str]) -> None:
        """Delete the groups of an evaluation whose record was written, those that wait for the archive later."""
        for start in range(0, len(groups), 100):
            group_keys = [self._keys.group(group) for group in groups[start : start + 100]]
            await self._call("delete_evaluated", group_keys=group_keys)


async def dead_letter_rejected(consumer: Consumer[M], deliveries: Sequence[Delivery[M]], effects: Sequence[int]) -> int:
    """Dead-letter those of the deliveries, one per effect, that do not belong to this run. Returns how many."""
    rejected = 0
    for delivery, effect in zip(deliveries, effects, strict=True):
        if reason := rejection(effect, delivery.message.group, delivery.message.index):
            await consumer.dead_letter(delivery, reason, Cause.INVALID)
            rejected += 1
    return rejected


async def read_fields(
    redis: Redis, keys: RunKeys, names: Sequence[str], fields: tuple[str, ...]
) -> list[list[bytes | None]]:
    """These fields of the hash of each group, in the order of `names`; None where a field or the hash is gone."""
    found: list[list[bytes | None]] = []
    for start in range(0, len(names), FIELDS_AT_ONCE):
        async with redis.pipeline(transaction=False) as pipe:
            for name in names[start : start + FIELDS_AT_ONCE]:
                pipe.hmget(keys.group(name), *fields)
            found += await pipe.execute()
    return found


async def read_groups(
    redis: Redis, keys: RunKeys, names: Sequence[str]
) -> AsyncIterator[tuple[str, dict[bytes, bytes]]]:
    """Each group with its whole hash, which is empty if it is gone; a few groups at a time."""
    for start in range(0, len(names), HASHES_AT_ONCE):
        chunk = names[start : start + HASHES_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipe:
            for name in chunk:
                pipe.hgetall(keys.group(name))
            hashes = await pipe.execute()
        for name, fields in zip(chunk, hashes, strict=True):
            yield name, fields


async def trim_released(redis: Redis, keys: RunKeys, lane: Lane, kept: int = RELEASED_KEPT) -> int:
    """Delete the hashes of the groups that were released first, beyond the last `kept`. Returns how many."""
    released, deleted = keys.lane(lane).released, 0
    while (surplus := await redis.llen(released) - kept) > 0:
        head = await redis.lrange(released, 0, min(surplus, FIELDS_AT_ONCE) - 1)
        done = await call(redis, "trim_released", released_key=released, group_keys=head, kept=kept)
        if not done:  # another process trims, or reopens groups
            break
        deleted += done
    return deleted


async def missing_samples(redis: Redis, keys: RunKeys, task: Task) -> list[int]:
    """The sample indices of a task that were not published yet; empty if the group was released.

    Raises RejectedMessageError for a group that this run does not have, or that has fewer samples.
    """
    published = [f"sample:{index}" for index in range(task.wanted)]
    state, samples, *entries = await redis.hmget(keys.group(task.group), "state", "samples", *published)
    if state is None:
        raise RejectedMessageError(f"group {task.group!r} is not a group of this run")
    if samples is not None and task.wanted > int(samples):
        raise RejectedMessageError(f"samples {task.wanted} exceed those of group {task.group!r}, {int(samples)}")
    if state != PENDING.encode():
        return []
    return [index for index, entry in enumerate(entries) if entry is None]
