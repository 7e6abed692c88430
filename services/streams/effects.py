"""Owns the effects services have on a run: each is one Lua call that also acks its input.

Must not decide anything; callers decide, these make it so exactly once.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from redis.exceptions import ResponseError

from services.contracts import Batch, GroupCounts, Lane, Release, Sample, SamplerState, StepRecord, Task, Verdict
from services.streams.connection import Redis
from services.streams.keys import RunKeys
from services.streams.leases import Lease
from services.streams.payloads import SamplePayload, pack

RELEASED_TTL_S = 3600
EVALUATED_TTL_S = 7 * 24 * 3600
"""An evaluation that is resumed must still know which of its groups were answered, however long it takes."""


class FencedError(RuntimeError):
    """A newer owner of this role exists; the caller must stop."""


def script(redis: Redis, name: str) -> Any:
    """The Lua script `lua/{name}.lua`, loaded into the server on first use."""
    return redis.register_script(files("services.streams").joinpath(f"lua/{name}.lua").read_text())


class Effects:
    """Everything a service may do to a run's groups. `epoch` is the caller's fence, 0 for unfenced roles."""

    def __init__(self, redis: Redis, keys: RunKeys, role: str, epoch: int = 0) -> None:
        self._redis = redis
        self._keys = keys
        self._epoch_key = keys.epoch(role)
        self._epoch = epoch
        names = (
            "dispatch", "publish_sample", "publish_verdict", "record_verdict", "release", "publish_batch",
            "commit_step",
        )  # fmt: skip
        self._scripts = {name: script(redis, name) for name in names}

    @classmethod
    async def fenced(cls, redis: Redis, keys: RunKeys, role: str) -> Effects:
        """Become the role's owner: every former owner's writes are refused from now on."""
        return cls(redis, keys, role, int(await redis.incr(keys.epoch(role))))

    @property
    def epoch(self) -> int:
        """The fence this caller writes with."""
        return self._epoch

    async def _call(self, name: str, keys: list[str], args: list[Any]) -> bool:
        try:
            return bool(await self._scripts[name](keys=keys, args=args))
        except ResponseError as error:
            if str(error).startswith("FENCED"):
                raise FencedError(str(error)) from None
            raise

    async def dispatch(self, lane: Lane, task: Task, state: SamplerState | None) -> bool:
        """Publish a task and count its group as dispatched. False if it had been dispatched before."""
        streams = self._keys.lane(lane)
        keys = [self._epoch_key, streams.tasks, self._keys.group(task.group), streams.counters, streams.pending]
        args = [self._epoch, task.group, task.model_dump_json(), state.model_dump_json() if state else ""]
        return await self._call("dispatch", [*keys, self._keys.sampler_state], args)

    async def publish_sample(self, lane: Lane, lease: Lease, total: int, sample: Sample, body: SamplePayload) -> bool:
        """Store a payload and announce its sample; acks the task with the last of `total`. False if not first."""
        streams = self._keys.lane(lane)
        keys = [self._keys.group(sample.group), sample.facts.payload, streams.samples, streams.tasks]
        fields = [part for pair in pack(body).items() for part in pair]
        args = [lease.consumer_group, lease.entry, total, sample.model_dump_json(), *fields]
        return await self._call("publish_sample", keys, args)

    async def publish_verdict(self, lane: Lane, lease: Lease, verdict: Verdict) -> bool:
        """Announce a verdict and ack its sample. False if the sample had been judged before."""
        streams = self._keys.lane(lane)
        keys = [self._keys.group(verdict.group), streams.verdicts, streams.samples]
        args = [lease.consumer_group, lease.entry, verdict.index, verdict.model_dump_json()]
        return await self._call("publish_verdict", keys, args)

    async def record_verdict(self, lane: Lane, lease: Lease, verdict: Verdict, decision: str, samples: int) -> bool:
        """Keep a verdict and ack it; `decision` is '' before the last one, then 'kept' or a release."""
        streams = self._keys.lane(lane)
        keys = [self._epoch_key, self._keys.group(verdict.group), streams.verdicts, streams.counters, streams.pending]
        args = [
            self._epoch, lease.consumer_group, lease.entry, verdict.index, verdict.model_dump_json(),
            verdict.group, decision, RELEASED_TTL_S if lane is Lane.TRAIN else EVALUATED_TTL_S, RELEASED_TTL_S,
            verdict.facts.response_tokens,
        ]  # fmt: skip
        return await self._call("record_verdict", [*keys, *self._payloads(verdict.group, samples)], args)

    async def release(self, lane: Lane, group: str, release: Release, samples: int) -> bool:
        """End a pending or kept group without training it. False if it had ended or was batched."""
        streams = self._keys.lane(lane)
        keys = [self._epoch_key, self._keys.group(group), streams.counters, streams.pending]
        args = [self._epoch, group, release.value, RELEASED_TTL_S]
        return await self._call("release", [*keys, *self._payloads(group, samples)], args)

    async def publish_batch(self, batch: Batch) -> bool:
        """Publish a batch of kept groups. False if one of them is not kept."""
        groups = [self._keys.group(one.group) for one in batch.groups]
        keys = [self._epoch_key, self._keys.batches, self._keys.sampler_state, *groups]
        args = [self._epoch, batch.model_dump_json(), batch.sampler_state.model_dump_json()]
        return await self._call("publish_batch", keys, args)

    async def commit_step(self, lease: Lease, batch: Batch, record: StepRecord) -> bool:
        """Record a rollout step and its policy version, and ack its batch. False if the version is not new."""
        streams = self._keys.lane(Lane.TRAIN)
        payloads = [sample.payload for group in batch.groups for sample in group.samples]
        keys = [
            self._epoch_key, self._keys.batches, self._keys.steps, self._keys.version, streams.counters,
            streams.pending, *(self._keys.group(name) for name in record.groups), *payloads,
        ]  # fmt: skip
        args = [
            self._epoch, lease.consumer_group, lease.entry, record.model_dump_json(), record.version,
            RELEASED_TTL_S, len(record.groups), *record.groups,
        ]  # fmt: skip
        return await self._call("commit_step", keys, args)

    def _payloads(self, group: str, samples: int) -> list[str]:
        return [self._keys.payload(group, index) for index in range(samples)]


async def group_counts(redis: Redis, keys: RunKeys, lane: Lane = Lane.TRAIN) -> GroupCounts:
    """The lane's counters, read in one transaction; `pending` is counted on its own, not derived."""
    streams = keys.lane(lane)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(streams.counters)
        pipe.scard(streams.pending)
        counters, pending = await pipe.execute()
    return GroupCounts(**{name.decode(): int(value) for name, value in counters.items()}, pending=pending)


async def response_tokens(redis: Redis, keys: RunKeys, lane: Lane = Lane.TRAIN) -> int:
    """The response tokens of all samples of the lane that have a verdict, whatever became of their groups."""
    return int(await redis.hget(keys.lane(lane).counters, "response_tokens") or 0)


async def missing_samples(redis: Redis, keys: RunKeys, task: Task) -> list[int]:
    """The sample indices of a group that nobody has published; empty when the group was released."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hget(keys.group(task.group), "state")
        for index in range(task.samples):
            pipe.exists(keys.payload(task.group, index))
        state, *exists = await pipe.execute()
    if state != b"pending":
        return []
    return [index for index, there in enumerate(exists) if not there]
