"""Owns the adoption of a run whose record or history Redis has lost: both are written again from the run's files.

Must not resume the run, nor read the files itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from services.contracts import Lane, RunState, SamplerState
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys
from services.streams.runs.remains import RunRemains
from services.streams.state.ended.cleanup import erase
from services.streams.state.events import EventLog, append_message
from services.streams.state.run_record import RecordChange, RunRecord, flat
from services.streams.state.runs import OWNER, RESUMABLE, RunRecords, RunStateError, UnknownRunError, UsedRunError

IDS_SKIPPED = 100_000
"""Of groups, after those of the newest archived batch: later ones may have been archived under the next ids."""


async def adopt_run(
    redis: Redis, run: str, remains: RunRemains, *, files: Mapping[str, str], place: str, project: str
) -> RunRecord:
    """The record of a run as failed, with the history of its newest checkpoint, from which a resumption continues.

    `files`: the texts of the user's files; `place`: where the run's files are. Step by step, and may be repeated until
    it is done. Raises UsedRunError if there is a record of another run, or of this one with a history.
    """
    records, keys, created_at = RunRecords(redis), RunKeys(run), remains.facts.created_at
    try:
        record = await records.get(run)
    except UnknownRunError:
        await erase(redis, keys, None)
        created_at = time.time() if created_at is None else created_at
        record = await records.create_failed(
            run, remains.facts.recipe, created_at, f"being adopted from {place}", files, project
        )
    else:
        await _check_same(redis, record, created_at)
    return await _restore(redis, record, remains, place)


async def _check_same(redis: Redis, record: RunRecord, created_at: float | None) -> None:
    same = created_at in (None, record.created_at)
    if not same or record.state not in RESUMABLE or record.closing or await redis.exists(RunKeys(record.id).policy):
        raise UsedRunError(record.id)


async def _restore(redis: Redis, record: RunRecord, remains: RunRemains, place: str) -> RunRecord:
    keys, step = RunKeys(record.id), remains.step
    trained = [found for found in remains.records if found.step <= step]
    for found in trained:
        await append_message(redis, keys, keys.steps, found, 0)
    done = 1
    if remains.records:  # without one, the run starts again from its model
        versions = [found.version for found in remains.records] + [
            found.version for found in remains.checkpoints.values()
        ]
        # A resumption rewinds to the step, so that the sampler continues with the checkpoint's snapshot.
        policy: dict[str, Any] = {"step": step, "version": max(versions), "announced": max(versions), "weights": ""}
        done = await call(
            redis,
            "restore_history",
            record_key=keys.record,
            policy_key=keys.policy,
            counters_key=keys.lane(Lane.TRAIN).counters,
            sampler_state_key=keys.sampler_state,
            checkpoints_key=keys.checkpoints,
            sampler_state=_sampler_state(remains),
            checkpoints=json.dumps(sorted(remains.checkpoints)),
            policy_list=flat({name: str(value) for name, value in policy.items()}),
            counter_list=flat(_counters(remains, sum(len(found.groups) for found in trained))),
        )
    if done < 1:
        raise RunStateError(f"run {record.id!r} was changed while it was adopted; retry")
    text = f"adopted from {place}, with {len(trained)} rollout steps; a resumption continues from step {step}"
    fields = {"model_path": remains.facts.model_path, "place": place}
    if remains.facts.inputs:
        fields["inputs"] = json.dumps(remains.facts.inputs)
    if remains.records:
        fields["adopted_step"] = str(step)
    change = RecordChange(RunState.FAILED, text, fields, drop=("cancel_requested", "pause_requested"))
    changed = await RunRecords(redis).change(record.id, RESUMABLE, change)
    await EventLog(redis, keys, OWNER).write("adopted", text)
    return changed


def _sampler_state(remains: RunRemains) -> str:
    found = remains.last_batch.sampler_state if remains.last_batch else SamplerState(cursor=0, next_group=0)
    return found.model_copy(update={"next_group": found.next_group + IDS_SKIPPED}).model_dump_json()


def _counters(remains: RunRemains, trained: int) -> dict[str, str]:
    """The counters at the step: the groups that were pending then are gone."""
    counts = remains.snapshot.counts if remains.snapshot else None
    others = {name: getattr(counts, name) if counts else 0 for name in ("filtered", "stale", "dead")}
    return {
        name: str(count)
        for name, count in {"trained": trained, **others, "dispatched": trained + sum(others.values())}.items()
    }
