"""Owns a run's weight history in Redis: versions announced, steps committed, batches waiting to be covered, rewinding.

Must not hold weights, nor decide when a checkpoint covers a step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass

from services.contracts import (
    Batch,
    CommittedPolicy,
    Lane,
    SamplerSnapshot,
    StepRecord,
    Task,
    WeightManifest,
    WeightPlan,
)
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.delivery.consumer import tail_messages
from services.streams.delivery.validation import Malformed
from services.streams.keys import EVALUATION_GROUP, RunKeys
from services.streams.retention import WEIGHT_MESSAGES_KEPT
from services.streams.state.events import EventLog, read_all, read_policy
from services.streams.state.group_state import become_owner, compress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedBatch:
    """A batch in the log, with its entry."""

    entry: str
    batch: Batch


class TakenBackError(RuntimeError):
    """A batch was trained whose entry was lost meanwhile. A learner that begins anew trains the one in its place."""


class History:
    """The learner's side. `epoch` is its fence; raises FencedError from every write once a newer learner exists."""

    def __init__(self, redis: Redis, keys: RunKeys, role: str, epoch: int) -> None:
        self._redis = redis
        self._keys = keys
        self._epoch_key = keys.epoch(role)
        self.epoch = epoch

    @classmethod
    async def fenced(cls, redis: Redis, keys: RunKeys, role: str) -> History:
        """Become the role's owner."""
        return cls(redis, keys, role, await become_owner(redis, keys, role))

    async def policy(self) -> CommittedPolicy | None:
        """The committed policy; None before the first."""
        return await read_policy(self._redis, self._keys)

    async def announce(self, step: int, weights: str) -> int:
        """The version to publish the weights of `step` under: the one that they have, or a new one."""
        return await call(
            self._redis,
            "announce_version",
            epoch_key=self._epoch_key,
            policy_key=self._keys.policy,
            epoch=self.epoch,
            step=step,
            weights=weights,
        )

    async def commit_policy(self, version: int, step: int, weights: str) -> None:
        """Make an announced version current without training: the first, or what a resumed run begins with."""
        await call(
            self._redis,
            "commit_policy",
            epoch_key=self._epoch_key,
            policy_key=self._keys.policy,
            epoch=self.epoch,
            version=version,
            step=step,
            weights=weights,
        )

    async def commit_step(self, record: StepRecord, entry: str) -> bool:
        """Record the rollout step that trained the batch of `entry`, and make its version current.

        False if it was before. Raises TakenBackError, FencedError.
        """
        streams = self._keys.lane(Lane.TRAIN)
        staleness = record.staleness or (0,) * len(record.groups)
        if len(staleness) != len(record.groups):
            raise ValueError(f"staleness: {len(staleness)} values for {len(record.groups)} groups")
        done = await call(
            self._redis,
            "commit_step",
            epoch_key=self._epoch_key,
            policy_key=self._keys.policy,
            steps_key=self._keys.steps,
            counters_key=streams.counters,
            pending_key=streams.pending,
            group_keys=[self._keys.group(group) for group in record.groups],
            epoch=self.epoch,
            version=record.version,
            step=record.step,
            weights=record.weights,
            record=record.model_dump_json(),
            batch_entry=entry,
            group_list=record.groups,
            staleness_list=staleness,
        )
        if done < 0:
            raise TakenBackError(f"the sampler took the batch of rollout step {record.step} back while it was trained")
        return bool(done)

    async def cover(self, logged: LoggedBatch) -> bool:
        """Let go of a batch whose step a checkpoint covers, and of its payloads. False if that was done before.

        Of a batch that is not the sampler's, or came twice, only the entry goes.
        """
        batch = logged.batch
        covered = await call(
            self._redis,
            "cover_batch",
            epoch_key=self._epoch_key,
            batches_key=self._keys.batches,
            released_key=self._keys.lane(Lane.TRAIN).released,
            snapshot_key=self._keys.snapshot(batch.step),
            group_keys=[self._keys.group(group.group) for group in batch.groups],
            payload_keys=[sample.payload for group in batch.groups for sample in group.samples],
            epoch=self.epoch,
            entry=logged.entry,
            step=batch.step,
            payload_count_list=[len(group.samples) for group in batch.groups],
        )
        return bool(covered)

    async def batches(self, after: str = "0-0", block_s: float = 0.0) -> list[LoggedBatch]:
        """The batches behind entry `after` that no checkpoint covers yet, oldest first; waits at most `block_s`.

        An entry that is no batch of this run is moved to the dead-letter stream.
        """
        found = await tail_messages(self._redis, self._keys, self._keys.batches, Batch, after, block_s=block_s)
        return [LoggedBatch(entry, batch) for entry, batch in found]

    async def accepts(self, logged: LoggedBatch, step: int) -> bool:
        """Whether a batch is the very entry that the sampler published for rollout step `step`.

        One that it published for a later step is left where it is: should the one before it be gone, the sampler takes
        both back. Any other is moved to the dead-letter stream.
        """
        found = await _noted(self._redis, self._keys, logged.batch)
        # A sampler of the release before this one notes no entry.
        own = str(logged.batch.step).encode()
        wanted = [[b"batched", own, entry] for entry in (logged.entry.encode(), None)]
        wrong = [one.group for one, fields in zip(logged.batch.groups, found, strict=True) if fields not in wanted]
        if logged.batch.step >= step and not wrong:
            return logged.batch.step == step
        why = f"not the batch of rollout step {step}: {wrong[0] if wrong else logged.batch.step}"
        log.error("%s: entry %s is given up: %s", self._keys.batches, logged.entry, why)
        body = logged.batch.model_dump_json().encode()
        letter = Malformed(why).letter(self._keys.batches, logged.entry, body, deliveries=1)
        await self._take_out(logged, letter.model_dump_json())
        return False

    async def give_back(self, logged: LoggedBatch) -> None:
        """Return a batch to the sampler, which takes it and those behind it back. Raises FencedError."""
        await self._take_out(logged, "")

    async def _take_out(self, logged: LoggedBatch, letter: str) -> None:
        await call(
            self._redis,
            "remove_batch",
            epoch_key=self._epoch_key,
            batches_key=self._keys.batches,
            dead_key=self._keys.dead,
            epoch=self.epoch,
            entry=logged.entry,
            letter=letter,
        )

    async def ended_at(self) -> int | None:
        """The rollout step whose batch was published as the run's last; None while that is open."""
        step, last = await self._redis.hmget(self._keys.queue, "step", "last")
        return int(step) if last == b"1" else None

    async def offer_snapshot(self, snapshot: SamplerSnapshot) -> None:
        """Lay the sampler's snapshot of a checkpoint down for the sampler, which takes the run back to it."""
        await self._keep(self._keys.snapshot(snapshot.step), compress(snapshot))

    async def list_checkpoints(self, steps: list[int]) -> None:
        """Tell people which rollout steps the run can be resumed from."""
        await self._keep(self._keys.checkpoints, json.dumps(steps))

    async def publish_plan(self, plan: WeightPlan) -> None:
        """Call the fleet to a broadcast. Raises FencedError."""
        await call(
            self._redis,
            "append_fenced",
            epoch_key=self._epoch_key,
            stream_key=self._keys.weight_plans,
            epoch=self.epoch,
            message=plan.model_dump_json(),
            kept=WEIGHT_MESSAGES_KEPT,
        )

    async def publish_manifest(self, manifest: WeightManifest) -> None:
        """Tell the fleet in which order tensors travel. Raises FencedError."""
        await self._keep(self._keys.manifest, manifest.model_dump_json())

    async def _keep(self, key: str, value: str | bytes) -> None:
        await call(self._redis, "set_fenced", epoch_key=self._epoch_key, value_key=key, epoch=self.epoch, value=value)


class GroupsChangedError(RuntimeError):
    """Somebody asked for another group meanwhile (a dead letter was redriven); read the open ones again."""


async def forget_evaluations(redis: Redis, keys: RunKeys, role: str, epoch: int, entries: list[str]) -> None:
    """Drop these evaluation records, and all that is under way on the evaluation lane. Raises FencedError."""
    lane = keys.lane(Lane.EVALUATION)
    # Nobody begins another evaluation meanwhile: its owner is the one who calls.
    patterns = (keys.group(f"{EVALUATION_GROUP}*"), keys.key(f"payload:{EVALUATION_GROUP}*"))
    # A sample whose payload stayed would count as published, and never be asked for again.
    gone = [key for pattern in patterns async for key in redis.scan_iter(pattern, 1000)]
    await call(
        redis,
        "delete_evaluations",
        epoch_key=keys.epoch(role),
        evaluations_key=keys.evaluations,
        lane_keys=[
            lane.tasks,
            lane.samples,
            lane.verdicts,
            lane.counters,
            lane.pending,
            lane.released,
            *gone,
        ],
        epoch=epoch,
        record_entry_list=entries,
    )


@dataclass(frozen=True)
class Reopened:
    """A group that goes back to pending: the task that asks for it, and whether it had been trained."""

    task: Task
    trained: bool


async def rewind(
    redis: Redis, keys: RunKeys, role: str, epoch: int, *, resumption: int, step: int, groups: list[Reopened],
    posteriors: dict[str, str], response_tokens: int | None,
) -> bool:  # fmt: skip
    """Take a run back to rollout step `step`, once per `resumption`. False when it was done before.

    Later steps leave the history, `groups` are asked for again, and the sampler's posteriors are those given, as is the
    count of response tokens unless that is None. Raises FencedError, GroupsChangedError.
    """
    streams = keys.lane(Lane.TRAIN)
    dropped = [entry for entry, record in await EventLog(redis, keys, role).steps() if record.step > step]
    logged = [batch for _, batch in await read_all(redis, keys, keys.batches, Batch)]
    stay = [group for batch in logged if batch.step <= step for group in batch.groups]
    snapshots = [keys.snapshot(step), *(keys.snapshot(batch.step) for batch in logged)]
    done = await call(
        redis,
        "rewind",
        epoch_key=keys.epoch(role),
        policy_key=keys.policy,
        counters_key=streams.counters,
        pending_key=streams.pending,
        tasks_key=streams.tasks,
        samples_key=streams.samples,
        verdicts_key=streams.verdicts,
        batches_key=keys.batches,
        steps_key=keys.steps,
        queue_key=keys.queue,
        posteriors_key=keys.posteriors,
        released_key=streams.released,
        dead_key=keys.dead,
        obsolete_keys=[*snapshots, *(sample.payload for group in stay for sample in group.samples)],
        epoch=epoch,
        resumption=resumption,
        step=step,
        group_prefix=keys.group(""),
        payload_prefix=keys.payload("", 0).removesuffix(":0"),
        response_tokens="" if response_tokens is None else response_tokens,
        open_groups=sum(not group.trained for group in groups),
        step_entry_list=dropped,
        prompt_list=list(posteriors),
        posterior_list=list(posteriors.values()),
        stay_trained_list=[group.group for group in stay],
        group_list=[group.task.group for group in groups],
        task_list=[group.task.model_dump_json() for group in groups],
        samples_list=[group.task.samples for group in groups],
        was_trained_list=[int(group.trained) for group in groups],
    )
    if done < 0:
        raise GroupsChangedError(f"run {keys.run!r}: other groups are open than a moment ago")
    return bool(done)


async def published_batches(redis: Redis, keys: RunKeys, steps: Collection[int]) -> list[Batch]:
    """Those of `steps` that were committed and that no checkpoint covers yet, as the sampler published them."""
    found, after = {}, "0-0"
    while some := await tail_messages(redis, keys, keys.batches, Batch, after):
        after = some[-1][0]
        for entry, batch in some:
            wanted = [b"trained", str(batch.step).encode(), entry.encode()]
            if batch.step in steps and all(fields == wanted for fields in await _noted(redis, keys, batch)):
                found[batch.step] = batch
    return [found[step] for step in sorted(found)]


async def _noted(redis: Redis, keys: RunKeys, batch: Batch) -> list[list[bytes | None]]:
    """What each group of a batch has noted of itself: its state, the rollout step, the batch's entry."""
    async with redis.pipeline(transaction=False) as pipe:
        for group in batch.groups:
            pipe.hmget(keys.group(group.group), "state", "step", "batch")
        found: list[list[bytes | None]] = await pipe.execute()
    return found
