"""A run that Redis has lost is adopted from its folder, and a real learner continues from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.service import LearnerService
from services.contracts import SamplerState
from services.process.hosting import ServiceThread
from services.sampler.rewind import rewind_run
from services.storage.mirror import NO_MIRROR
from services.streams.delivery.snapshots import compress_snapshot
from services.streams.keys import RunKeys
from services.streams.runs.adopting.adoption import adopt_run
from services.streams.runs.remains import read_remains
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import RunRecords
from tests.harness.small_run import service_context
from tests.learner.running import put_batch, stop, submit, until_event, until_step
from tests.services.driven import snapshot_at

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]


async def test_a_learner_continues_an_adopted_run(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a learner that is killed: one that is asked to stop writes the checkpoint of step 3.
    monkeypatch.setattr(CheckpointSchedule, "owed", False)
    keys, records = RunKeys(run_id), RunRecords(redis)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 4}, learner={"checkpoint_every": 2})
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        for version in range(3):
            await redis.set(keys.snapshot(version + 1), compress_snapshot(snapshot_at(version + 1)))
            await put_batch(redis, keys, version)
            await until_step(redis, keys, version + 1)
        await until_event(redis, keys, "checkpoint")
    finally:
        await stop(thread)
    before = {step.step: step for _, step in await EventLog(redis, keys, "test").steps()}
    async for key in redis.scan_iter(match=keys.key("*"), count=1000):
        await redis.unlink(key)
    await records.index(run_id)
    assert not await records.exists(run_id)

    folder = runs_folder / run_id
    remains = read_remains(folder, NO_MIRROR, run_id)
    assert (len(remains.records), remains.step) == (3, 2)
    await adopt_run(redis, run_id, remains, files={}, place=str(folder), project="default")
    resumed = await records.resume(run_id)
    assert (resumed.resume_step, resumed.model_path) == (2, str(tiny_model))

    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        async with service_context(redis, run_id, {}, "sampler") as sampler:
            transitions = await GroupTransitions.fenced(redis, keys, "sampler")

            async def archived() -> None:
                """Nothing is left to archive."""

            await rewind_run(sampler, transitions, (), archived)
        ready = await until_event(redis, keys, "ready")
        assert "learner ready at step 2, from the checkpoint of step 2 and 0 archived batches" in ready
        policy = await read_policy(redis, keys)
        assert policy is not None
        assert (policy.step, policy.version > before[3].version, policy.weights) == (2, True, before[2].weights)
        await put_batch(redis, keys, 2)
        await until_step(redis, keys, 3)
    finally:
        await stop(thread)
    after = {step.step: step for _, step in await EventLog(redis, keys, "test").steps()}
    assert after[3].weights == before[3].weights, "the same batch gives the same weights"
    state = SamplerState.model_validate_json(await redis.get(keys.sampler_state))
    assert state.next_group > 0
