"""Owns a run's weight history in Redis: versions announced, steps committed, batches until they are released.

Must not hold weights, nor decide when a batch is released.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.contracts import (
    Batch,
    CommittedPolicy,
    Lane,
    SamplerSnapshot,
    StepRecord,
    WeightManifest,
    WeightPlan,
)
from services.streams.connection.client import Redis
from services.streams.delivery.consumer import discard_entry, rejection, tail_messages
from services.streams.delivery.snapshots import compress_snapshot
from services.streams.keys import RunKeys
from services.streams.retention import WEIGHT_MESSAGES_KEPT
from services.streams.state.group_state import read_fields
from services.streams.state.ownership import RoleOwner

GROUPS_PER_CALL, PAYLOADS_PER_CALL = 64, 2048
STEP_LOST = -2
"""The reply of commit_step when Redis lost the step before."""


def groups_per_call(samples: int) -> int:
    """How many groups of up to `samples` samples one call may free, because Redis serves no other client meanwhile."""
    return max(1, min(GROUPS_PER_CALL, PAYLOADS_PER_CALL // max(1, samples)))


async def read_policy(redis: Redis, keys: RunKeys) -> CommittedPolicy | None:
    """A run's committed policy; None before the first."""
    fields = {name.decode(): value.decode() for name, value in (await redis.hgetall(keys.policy)).items()}
    return CommittedPolicy.model_validate(fields) if "version" in fields else None


async def committed_step(redis: Redis, keys: RunKeys) -> int:
    """The last committed rollout step of a run's weight history; 0 before the first."""
    policy = await read_policy(redis, keys)
    return policy.step if policy else 0


@dataclass(frozen=True)
class LoggedBatch:
    """A batch in the log, with its entry."""

    entry: str
    batch: Batch


class StateLostError(RuntimeError):
    """Redis lost writes that it had acknowledged. A restarted learner resumes at the step that Redis holds."""

    def __init__(self, committed: int) -> None:
        super().__init__(
            f"Redis lost acknowledged writes: rollout step {committed} was committed, and is not any more; "
            "set appendfsync to always to prevent this, and see Sentinel in docs/operations/redis.md"
        )


class VersionLostError(RuntimeError):
    """A replica holds a version whose announcement Redis lost. A restarted learner announces a newer one."""

    def __init__(self, held: int, announced: int) -> None:
        super().__init__(
            f"Redis lost acknowledged writes: a replica holds policy version {held}, but the newest that was announced "
            f"is {announced}"
        )


class BatchReclaimedError(RuntimeError):
    """The sampler reclaimed a batch while it was trained, because its entry was lost.

    A restarted learner trains the batch that replaces it.
    """


class History(RoleOwner):
    """The learner's side."""

    async def policy(self) -> CommittedPolicy | None:
        """The committed policy; None before the first."""
        return await read_policy(self._redis, self._keys)

    async def announce(self, step: int, weights: str, max_staleness: int, held: int = -1) -> int:
        """The version under which to publish the weights of `step`: the one that they have, or a new one.

        The policy keeps the step of each version that may still be trained, by `max_staleness`. `held`: the newest
        version that a replica holds; if a failover lost its announcement, the new version is above it.
        """
        return await self._call(
            "announce_version",
            policy_key=self._keys.policy,
            step=step,
            weights=weights,
            oldest_step=step - 1 - max_staleness,
            held=held,
        )

    async def check_held(self, version: int) -> None:
        """Raise VersionLostError if a replica holds a `version` that was never announced.

        It would take no older one, and no response of it can be trained.
        """
        policy = await self.policy()
        newest = max(policy.announced, policy.version) if policy else -1
        if version > newest:
            raise VersionLostError(version, newest)

    async def commit_policy(self, version: int, step: int, weights: str) -> None:
        """Make an announced version current without training: the first, or the first of a resumed run."""
        await self._call("commit_policy", policy_key=self._keys.policy, version=version, step=step, weights=weights)

    async def commit_step(self, record: StepRecord, entry: str) -> bool:
        """Record the rollout step that trained the batch of `entry`, and make its version current.

        False if that was done before. Raises BatchReclaimedError, StateLostError, FencedError.
        """
        streams = self._keys.lane(Lane.TRAIN)
        staleness = record.staleness or (0,) * len(record.groups)
        if len(staleness) != len(record.groups):
            raise ValueError(
                f"staleness: {staleness} is not valid: expected one value per group ({len(record.groups)})"
            )
        numbers = record.optimizer_step_of or (None,) * len(record.groups)
        if len(numbers) != len(record.groups):
            raise ValueError(
                f"optimizer_step_of: {numbers} is not valid: expected one value per group ({len(record.groups)})"
            )
        done = await self._call(
            "commit_step",
            policy_key=self._keys.policy,
            steps_key=self._keys.steps,
            counters_key=streams.counters,
            pending_key=streams.pending,
            in_flight_key=streams.tokens_in_flight,
            step_tokens_key=self._keys.step_tokens,
            group_keys=[self._keys.group(group) for group in record.groups],
            version=record.version,
            step=record.step,
            weights=record.weights,
            record=record.model_dump_json(),
            batch_entry=entry,
            group_list=record.groups,
            staleness_list=staleness,
            optimizer_step_list=["" if number is None else number for number in numbers],
        )
        if done == STEP_LOST:
            raise StateLostError(record.step - 1)
        if done < 0:
            raise BatchReclaimedError(
                f"the sampler reclaimed the batch of rollout step {record.step} while it was trained"
            )
        return bool(done)

    async def release_batch(self, logged: LoggedBatch) -> bool:
        """Delete a batch that is committed and archived from Redis. False if that was done before.

        Its groups, with their payloads and their part of the batch, then wait for the archive of groups. In several
        calls, because Redis serves no other client during one. The entry goes with the last of them, so that
        a release which was cut off is found again. The sampler's snapshot of the step stays until the next release, for
        a checkpoint. For a batch that the sampler did not write, or a copy, only the entry is deleted.
        """
        groups, done = logged.batch.groups, 0
        size = groups_per_call(max((len(group.samples) for group in groups), default=1))
        for start in range(0, len(groups), size):
            chunk = groups[start : start + size]
            done = await self._call(
                "release_batch",
                batches_key=self._keys.batches,
                unarchived_key=self._keys.lane(Lane.TRAIN).unarchived,
                snapshot_key=self._keys.snapshot(logged.batch.step - 1),
                group_keys=[self._keys.group(group.group) for group in chunk],
                entry=logged.entry,
                step=logged.batch.step,
                last=int(start + size >= len(groups)),
                trained_list=[group.model_dump_json() for group in chunk],
            )
        return bool(done)

    async def release_committed(self, step: int) -> None:
        """Release the batches up to `step`, the committed one: a previous learner may not have come to that."""
        after = "0-0"
        while found := await self.batches(after):
            after = found[-1].entry
            for logged in found:
                if logged.batch.step <= step:
                    await self.release_batch(logged)

    async def batches(self, after: str = "0-0", block_s: float = 0.0) -> list[LoggedBatch]:
        """The batches after entry `after` that are not released yet, oldest first; waits at most `block_s`.

        An entry that is not a batch of this run is moved to the dead-letter stream.
        """
        found = await tail_messages(self._redis, self._keys, self._keys.batches, Batch, after, block_s=block_s)
        return [LoggedBatch(entry, batch) for entry, batch in found]

    async def accepts(self, logged: LoggedBatch, step: int) -> bool:
        """Whether a batch is the entry that the sampler published for rollout step `step`.

        An entry published for a later step is left in the log: if the one before it is gone, the sampler reclaims both.
        Any other is moved to the dead-letter stream.
        """
        names = [group.group for group in logged.batch.groups]
        found = await read_fields(self._redis, self._keys, names, ("state", "step", "batch"))
        # A sampler of the previous release records no entry.
        own = str(logged.batch.step).encode()
        wanted = [[b"batched", own, entry] for entry in (logged.entry.encode(), None)]
        wrong = [name for name, fields in zip(names, found, strict=True) if fields not in wanted]
        if logged.batch.step >= step and not wrong:
            return logged.batch.step == step
        why = f"not the batch of rollout step {step}: {wrong[0] if wrong else logged.batch.step}"
        stream, owner = self._keys.batches, {"epoch_key": self._epoch_key, "fence": self.fence.token}
        letter = rejection(stream, logged.entry, logged.batch, why)
        await discard_entry(self._redis, self._keys, stream, logged.entry, letter, **owner)
        return False

    async def final_step(self) -> int | None:
        """The rollout step whose batch was published as the run's last; None before that."""
        step, last = await self._redis.hmget(self._keys.queue, "step", "last")
        return int(step) if last == b"1" else None

    async def publish_snapshot(self, snapshot: SamplerSnapshot) -> None:
        """Store the sampler's snapshot of a checkpoint for the sampler, which rewinds the run to it."""
        await self._set(self._keys.snapshot(snapshot.step), compress_snapshot(snapshot))

    async def publish_checkpoints(self, steps: list[int]) -> None:
        """Store the rollout steps from which the run can be resumed."""
        await self._set(self._keys.checkpoints, json.dumps(steps))

    async def publish_plan(self, plan: WeightPlan) -> None:
        """Publish the plan of a broadcast to the fleet. Raises FencedError."""
        await self._call(
            "append_fenced",
            stream_key=self._keys.weight_plans,
            message=plan.model_dump_json(),
            kept=WEIGHT_MESSAGES_KEPT,
        )

    async def publish_manifest(self, manifest: WeightManifest) -> None:
        """Publish the order of the tensors in a broadcast to the fleet. Raises FencedError."""
        await self._set(self._keys.manifest, manifest.model_dump_json())

    async def _set(self, key: str, value: str | bytes) -> None:
        await self._call("set_fenced", value_key=key, value=value)
