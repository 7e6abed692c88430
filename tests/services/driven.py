"""Owns a run that a test drives by hand on a real server: its messages, its consumers, and the content of its keys.

Must not be used outside tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from services.contracts import (
    Batch,
    BatchGroup,
    BatchSample,
    Cause,
    DeadLetter,
    Event,
    GroupCounts,
    Lane,
    Message,
    OptimizerStepRecord,
    Outcome,
    Prompt,
    Sample,
    SampleFacts,
    SamplerSnapshot,
    SamplerState,
    Sampling,
    StepRecord,
    Task,
    Verdict,
    VersionSpan,
)
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease
from services.streams.delivery.payloads import SamplePayload
from services.streams.keys import ACTIVE_RUNS, RunKeys
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import Effect, GroupTransitions, RejectedMessageError, rejection
from services.streams.state.policy_history import History, LoggedBatch
from services.streams.unarchived import Unarchived

PROMPT = Prompt(id="p0", messages=({"role": "user", "content": "1 + 1"},), verifier="pattern", reference={})
STATE = SamplerState(cursor=1, next_group=1)
BODY = SamplePayload(
    prompt_ids=np.array([5, 6, 7], np.int32),
    response_ids=np.array([8, 9], np.int32),
    behaviour_logprobs=np.array([-0.5, -1.25], np.float32),
    text="zwölf",
    finish_reason="stop",
    spans=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
)
EVENT = Event(service="test", phase="test", text="a line", at=1.0)


def task_of(group: str, samples: int = 2, stop: int | None = None) -> Task:
    """A task of the training lane."""
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8)
    return Task(group=group, prompt=PROMPT, samples=samples, sampling=sampling, stop=stop)


LETTER = DeadLetter(
    stream=RunKeys("r").lane(Lane.TRAIN).tasks,
    entry="1-0",
    reason="why",
    deliveries=1,
    cause=Cause.DELIVERIES,
    group="g0",
    prompt="p0",
    body=task_of("g0").model_dump_json(),
    size=len(task_of("g0").model_dump_json()),
    at=1.0,
)


def sample_of(keys: RunKeys, group: str, index: int, started_at: float = 1.0) -> Sample:
    """A sample; `started_at` distinguishes the attempts at one index."""
    facts = SampleFacts(
        payload=keys.payload(group, index),
        prompt_tokens=3,
        response_tokens=2,
        truncated=False,
        mean_logprob=-0.875,
        oldest_version=3,
        newest_version=4,
        started_at=started_at,
        finished_at=started_at + 1.0,
    )
    return Sample(group=group, index=index, verifier="pattern", reference={}, facts=facts)


def verdict_on(sample: Sample, outcome: Outcome = Outcome.CORRECT) -> Verdict:
    """A verdict on the sample."""
    return Verdict(group=sample.group, index=sample.index, outcome=outcome, score=1.0, facts=sample.facts)


def batch_of(keys: RunKeys, step: int, groups: Iterable[str], samples: int = 2, *, last: bool = False) -> Batch:
    """The batch of a rollout step."""
    batch_groups = tuple(
        BatchGroup(
            group=group,
            samples=tuple(
                BatchSample(
                    payload=keys.payload(group, index),
                    tokens=2,
                    advantage=1.0,
                    reward=1.0,
                    correct=True,
                    masked=False,
                    staleness=0,
                )
                for index in range(samples)
            ),
            prompt="p0",
            staleness=1,
        )
        for group in groups
    )
    return Batch(
        step=step,
        version=step - 1,
        groups=batch_groups,
        sampler_state=STATE,
        sampling_metrics={},
        generation_started_at=1.0,
        generation_finished_at=2.0,
        last=last,
        snapshot=keys.snapshot(step),
    )


def snapshot_at(step: int) -> SamplerSnapshot:
    """The snapshot of a sampler that publishes the batch of `step`."""
    return SamplerSnapshot(step=step, state=STATE, counts=GroupCounts(), posteriors={"p0": "1:1:0"})


def record_of(batch: Batch, version: int, weights: str = "") -> StepRecord:
    """The step record of a batch that the learner trained."""
    return StepRecord(
        step=batch.step,
        version=version,
        optimizer_steps=2,
        optimizer=(OptimizerStepRecord(loss=0.25, gradient_norm=1.0, applied=True),) * 2,
        groups=tuple(group.group for group in batch.groups),
        metrics={},
        generation_started_at=1.0,
        generation_finished_at=2.0,
        learning_started_at=3.0,
        learning_finished_at=4.0,
        prompts=tuple(group.prompt for group in batch.groups),
        staleness=tuple(group.staleness for group in batch.groups),
        weights=weights or f"w{batch.step}",
        optimizer_step_of=tuple(at // 2 + 1 for at in range(len(batch.groups))),
    )


def is_first(effects: Sequence[int], message: Sample | Verdict) -> bool:
    """Whether a message alone was the first of its kind. Raises RejectedMessageError."""
    [effect] = effects
    if reason := rejection(effect, message.group, message.index):
        raise RejectedMessageError(reason)
    return effect == Effect.FRESH


async def publish_sample(
    transitions: GroupTransitions, lane: Lane, lease: Lease, wanted: int, sample: Sample, body: SamplePayload
) -> bool:
    """Publish one sample. False if it was not the first. Raises RejectedMessageError."""
    return is_first(await transitions.publish_samples(lane, lease, wanted, [(sample, body)]), sample)


async def publish_verdict(transitions: GroupTransitions, lane: Lane, lease: Lease, verdict: Verdict) -> bool:
    """Publish one verdict. False if it was not the first. Raises RejectedMessageError."""
    return is_first(await transitions.publish_verdicts(lane, [(lease, verdict)]), verdict)


async def record_verdict(
    transitions: GroupTransitions, lane: Lane, lease: Lease, verdict: Verdict, *arguments: Any, **others: Any
) -> bool:
    """Record one verdict. False if it had no effect. Raises RejectedMessageError, FencedError."""
    return is_first(
        await transitions.record_verdicts(lane, verdict.group, [(lease, verdict)], *arguments, **others), verdict
    )


class Hasty:
    """A client that does not wait for entries: no other process would add one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def xreadgroup(self, *arguments: Any, block: int | None = None, **others: Any) -> Any:
        assert block, "the read would wait for ever"
        return await self._client.xreadgroup(*arguments, **others)


class Dying:
    """A client whose process dies after some calls of functions."""

    def __init__(self, redis: Any, calls: int) -> None:
        self._redis, self.left = redis, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def fcall(self, *arguments: Any) -> Any:
        if self.left == 0:
            raise ConnectionAbortedError("the process died")
        self.left -= 1
        return await self._redis.fcall(*arguments)


async def put_stub_record(redis: Any, keys: RunKeys) -> None:
    """Something of a record, without which a run has no events and no consumer groups; no run is listed or shown."""
    await redis.hset(keys.record, "put_by", "a test")


class DrivenRun:
    """A run's consumers and transitions. `open` makes one, and the owner of the sampler's and the learner's role."""

    def __init__(self, redis: Any, keys: RunKeys, lease_s: float, max_deliveries: int) -> None:
        self.redis, self.keys = redis, keys
        self.streams = keys.lane(Lane.TRAIN)
        self._leasing = lease_s, max_deliveries
        self.transitions = GroupTransitions(redis, keys, "any")
        self.sampler: GroupTransitions
        self.learner: History

    @classmethod
    async def open(
        cls, redis: Any, keys: RunKeys, lease_s: float = 30.0, max_deliveries: int = 2, *, new: bool = True
    ) -> DrivenRun:
        """A run whose consumer groups exist; a `new` one gets something of a record."""
        run = cls(redis, keys, lease_s, max_deliveries)
        if new:
            await put_stub_record(redis, keys)
        run.sampler = await GroupTransitions.fenced(redis, keys, "sampler")
        run.learner = await History.fenced(redis, keys, "learner")
        for consumer in (run.rollout(), run.verifier(), run.judge()):
            await consumer.open()
        return run

    def _consumer(self, stream: str, group: str, name: str, model: type[Any]) -> Consumer[Any]:
        return Consumer(self.redis, self.keys, stream, group, name, model, *self._leasing)

    def rollout(self, name: str = "r0") -> Consumer[Task]:
        """A consumer of tasks; its first read looks for lapsed leases, as every consumer's does."""
        return self._consumer(self.streams.tasks, "rollout", name, Task)

    def verifier(self, name: str = "v0") -> Consumer[Sample]:
        """A consumer of samples."""
        return self._consumer(self.streams.samples, "verifier", name, Sample)

    def judge(self, name: str = "s0") -> Consumer[Verdict]:
        """A consumer of verdicts."""
        return self._consumer(self.streams.verdicts, "sampler", name, Verdict)

    async def lapse(self, lease: Lease) -> None:
        """Make the lease as old as one that was never renewed, without waiting."""
        idle = int(self._leasing[0] * 1000) + 1000
        await self.redis.xclaim(
            lease.stream, lease.consumer_group, lease.consumer, 0, [lease.entry], idle=idle, justid=True
        )

    async def dispatched(self, group: str, samples: int = 2, stop: int | None = None) -> Delivery[Task]:
        """A new group, whose task a replica holds."""
        assert await self.sampler.dispatch(Lane.TRAIN, [task_of(group, samples, stop)], STATE)
        [delivery] = await self.rollout().read(1, 1)
        assert delivery.message.group == group
        return delivery

    async def publish(self, lease: Lease, sample: Sample, wanted: int = 2) -> bool:
        """Publish a sample with the payload that all of them share."""
        return await publish_sample(self.transitions, Lane.TRAIN, lease, wanted, sample, BODY)

    async def published(self, group: str, samples: int = 2) -> list[Delivery[Sample]]:
        """A new group with all its samples, which a verifier holds."""
        delivery = await self.dispatched(group, samples)
        for index in range(samples):
            assert await self.publish(delivery.lease, sample_of(self.keys, group, index), samples)
        return await self.verifier().read(samples, 1)

    async def judged(self, group: str, samples: int = 2) -> list[Delivery[Verdict]]:
        """A new group with a verdict on each sample, which the sampler holds."""
        for delivery in await self.published(group, samples):
            verdict = verdict_on(delivery.message)
            assert await publish_verdict(self.transitions, Lane.TRAIN, delivery.lease, verdict)
        return await self.judge().read(samples, 1)

    async def decided(self, group: str, decision: str, samples: int = 2) -> None:
        """A new group, from its dispatch to the sampler's decision."""
        *first, last = await self.judged(group, samples)
        for delivery in first:
            await record_verdict(self.sampler, Lane.TRAIN, delivery.lease, delivery.message, "")
        await record_verdict(self.sampler, Lane.TRAIN, last.lease, last.message, decision)

    async def batched(self, step: int, *groups: str, last: bool = False) -> LoggedBatch:
        """A batch of new groups, as the learner reads it from the log."""
        for group in groups:
            await self.decided(group, "kept")
        assert await self.sampler.publish_batch(batch_of(self.keys, step, groups, last=last), snapshot_at(step))
        return (await self.learner.batches())[-1]

    async def trained(self, step: int, *groups: str) -> LoggedBatch:
        """A rollout step of new groups, committed."""
        logged = await self.batched(step, *groups)
        version = await self.learner.announce(step, f"w{step}", 1)
        assert await self.learner.commit_step(record_of(logged.batch, version), logged.entry)
        return logged

    @property
    def unarchived(self) -> Unarchived:
        """The groups that wait for the archive, as the owner of the sampler's role sees them."""
        return Unarchived(self.redis, self.keys, "sampler", self.sampler.fence)

    async def archived(self, lane: Lane = Lane.TRAIN) -> list[str]:
        """Take all groups that wait for the archive off its list, as if they were written; their names."""
        found = [name for bare in (True, False) for name in await self.unarchived.names(lane, 1000, bare=bare)]
        assert await self.unarchived.take(lane, await self.unarchived.hashes(found)) == len(found)
        return found

    async def append(self, stream: str, *bodies: bytes | Message) -> list[str]:
        """Add entries to a stream without the platform's checks, and return their ids."""
        raw = [body.model_dump_json().encode() if isinstance(body, Message) else body for body in bodies]
        return [(await self.redis.xadd(stream, {"m": body})).decode() for body in raw]

    async def counts(self, lane: Lane = Lane.TRAIN) -> dict[str, int]:
        """The counters that are not zero; they must reconcile."""
        counts = await group_counts(self.redis, self.keys, lane)
        assert counts.reconciled, counts
        return {name: value for name, value in counts.model_dump(exclude={"reconciled"}).items() if value}

    async def state(self, group: str) -> str | None:
        """The group's state; None when its hash is gone."""
        state = await self.redis.hget(self.keys.group(group), "state")
        return state.decode() if state else None


async def contents(redis: Any, keys: RunKeys) -> dict[str, Any]:
    """All that Redis holds of a run, except the idle times of leases and the times of heartbeats.

    Equal if and only if nothing else changed.
    """
    content: dict[str, Any] = {"active": bool(await redis.sismember(ACTIVE_RUNS, keys.run))}
    async for key in redis.scan_iter(match=keys.key("*"), count=1000):
        kind = (await redis.type(key)).decode()
        content[key.decode()] = kind, await READERS[kind](redis, key)
    if keys.heartbeats in content:
        kind, announced = content[keys.heartbeats]
        content[keys.heartbeats] = kind, {name: value.partition(b" ")[2] for name, value in announced.items()}
    return content


async def set_back(redis: Any, keys: RunKeys, process: str, seconds: float) -> None:
    """Make a process's last heartbeat `seconds` older, as if it had been silent, or Redis' clock had jumped."""
    at_ms, _, info = (await redis.hget(keys.heartbeats, process)).partition(b" ")
    await redis.hset(keys.heartbeats, process, b"%d %s" % (int(at_ms) - seconds * 1000, info))


def _checksum(data: bytes) -> bytes:
    """CRC-64/Jones, with which a server protects what DUMP returns."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x95AC9329AC4BC9B5 if crc & 1 else 0)
    return crc.to_bytes(8, "little")


async def set_clock_back(redis: Any, stream: str, seconds: int) -> None:
    """Move the times of all leases of a stream into the future, as if the server's clock had been set back."""
    dump = (await redis.dump(stream))[:-8]
    for group in (await redis.xinfo_stream(stream, full=True))["groups"]:
        for _, _, at_ms, _ in group["pending"]:
            dump = dump.replace(at_ms.to_bytes(8, "little"), (at_ms + seconds * 1000).to_bytes(8, "little"))
    await redis.restore(stream, 0, dump + _checksum(dump), replace=True)


async def _stream(redis: Any, key: bytes) -> Any:
    groups = {}
    for group in await redis.xinfo_groups(key):
        pending = await redis.xpending_range(key, group["name"], "-", "+", 1000)
        leases = [(lease["message_id"], lease["consumer"], lease["times_delivered"]) for lease in pending]
        groups[group["name"]] = group["last-delivered-id"], leases
    return await redis.xrange(key), groups


READERS = {
    "string": lambda redis, key: redis.get(key),
    "hash": lambda redis, key: redis.hgetall(key),
    "set": lambda redis, key: redis.smembers(key),
    "list": lambda redis, key: redis.lrange(key, 0, -1),
    "stream": _stream,
}
