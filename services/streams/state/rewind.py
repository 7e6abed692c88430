"""Owns the rewind of a run to an older rollout step: what leaves the history, and what is drawn again.

Must not choose the step, nor the groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts import Batch, Lane, Task
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import EVALUATION_GROUP, RunKeys
from services.streams.state.events import EventLog, read_all


class GroupsChangedError(RuntimeError):
    """Another group was dispatched meanwhile (a dead letter was redriven); read the open ones again."""


async def delete_evaluations(redis: Redis, keys: RunKeys, role: str, epoch: int, entries: list[str]) -> None:
    """Delete these evaluation records, and everything in flight on the evaluation lane. Raises FencedError."""
    lane = keys.lane(Lane.EVALUATION)
    # No other evaluation starts meanwhile: the caller owns them.
    patterns = (keys.group(f"{EVALUATION_GROUP}*"), keys.key(f"payload:{EVALUATION_GROUP}*"))
    # A sample whose payload stayed would count as published and never be drawn again.
    leftovers = [key for pattern in patterns async for key in redis.scan_iter(pattern, 1000)]
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
            *leftovers,
        ],
        epoch=epoch,
        record_entry_list=entries,
    )


@dataclass(frozen=True)
class ReopenedGroup:
    """A group that becomes pending again: its task, and whether it had been trained."""

    task: Task
    trained: bool


@dataclass(frozen=True)
class RewindTarget:
    """Where a run is rewound to: rollout step `step`, for its `resumption`, counted from 1.

    `groups` are drawn again; `posteriors` replace the sampler's, by prompt id, as `response_tokens` replaces the count
    of response tokens unless it is None.
    """

    resumption: int
    step: int
    groups: list[ReopenedGroup]
    posteriors: dict[str, str]
    response_tokens: int | None


async def rewind(redis: Redis, keys: RunKeys, role: str, epoch: int, target: RewindTarget) -> bool:
    """Rewind a run, once per resumption: later steps leave the history. False if that was done before.

    Raises FencedError, GroupsChangedError.
    """
    step, groups = target.step, target.groups
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
        resumption=target.resumption,
        step=step,
        group_prefix=keys.group(""),
        payload_prefix=keys.payload("", 0).removesuffix(":0"),
        response_tokens="" if target.response_tokens is None else target.response_tokens,
        open_groups=sum(not group.trained for group in groups),
        step_entry_list=dropped,
        prompt_list=list(target.posteriors),
        posterior_list=list(target.posteriors.values()),
        stay_trained_list=[group.group for group in stay],
        group_list=[group.task.group for group in groups],
        task_list=[group.task.model_dump_json() for group in groups],
        samples_list=[group.task.samples for group in groups],
        was_trained_list=[int(group.trained) for group in groups],
    )
    if done < 0:
        raise GroupsChangedError(f"run {keys.run!r}: the open groups changed meanwhile")
    return bool(done)
