"""A step that was trained again with another result: it is reported, and its checkpoint says what it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import write_manifest
from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.rank import batch_training
from learner.rank.checkpoint_writer import CheckpointWriter
from learner.service import LearnerService
from services.process.hosting import ServiceThread
from services.streams.delivery.payloads import SamplePayload
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.policy_history import read_policy
from tests.learner.running import put_batch, stop, submit, until_event, until_step

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]


async def test_a_step_trained_again_with_another_result(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 4}, learner={"checkpoint_every": 2})
    event_log = EventLog(redis, keys, "test")
    checkpoints = Checkpoints(RunArchive(runs_folder / run_id))

    @asynccontextmanager
    async def learner() -> AsyncIterator[None]:
        thread = ServiceThread(LearnerService(), run_id, redis_url)
        try:
            yield
        finally:
            await stop(thread)

    async def texts(phase: str) -> list[str]:
        return [event.text for _, event in await event_log.events() if event.phase == phase]

    with monkeypatch.context() as without_checkpoints:
        without_checkpoints.setattr(CheckpointWriter, "due", lambda *_: False)
        without_checkpoints.setattr(CheckpointSchedule, "overdue", False)
        without_checkpoints.setattr(CheckpointSchedule, "owed", False)
        async with learner():
            for version in range(2):
                await put_batch(redis, keys, version)
            await until_step(redis, keys, 2)
    with monkeypatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(batch_training, "archived_payloads", rounded_differently(batch_training.archived_payloads))
        async with learner():
            await until_event(redis, keys, "checkpoint")

    _, record = (await event_log.steps())[-1]
    policy = await read_policy(redis, keys)
    assert policy is not None
    assert (policy.step, policy.version, record.version) == (2, 3, 2)
    [checkpoint] = checkpoints.complete()
    assert (checkpoint.weights, checkpoint.saved_weights) == (record.weights, policy.weights)
    assert checkpoint.version == policy.version
    assert record.weights != policy.weights
    [text] = await texts("retrained-differs")
    assert text == f"step 2: trained again, its weights are {policy.weights}; the committed step has {record.weights}"
    assert (await texts("checkpoint"))[0].startswith("policy version 3, step 2: ")

    async with learner():
        await until_ready(texts, 3)
    assert "from the checkpoint of step 2 and 0 archived batches" in (await texts("ready"))[-1]
    assert (await texts("ready"))[-1].endswith("(bit-identical to the committed one)")
    write_manifest(checkpoints.path(checkpoint), checkpoint.model_copy(update={"saved_weights": "other", "digest": ""}))
    async with learner():
        await until_ready(texts, 4)
    [text] = await texts("archive-differs")
    assert text.startswith(f"step 2: the weights loaded from checkpoint {checkpoint.name} are {policy.weights}; ")
    assert len(await texts("retrained-differs")) == 1, "only when it happens"


def rounded_differently(archived_payloads: Any) -> Any:
    """Archived payloads that give another result, which stands for another order of sums."""

    def found(*given: Any) -> dict[str, SamplePayload]:
        payloads: dict[str, SamplePayload] = archived_payloads(*given)
        changed = {key: payload.behaviour_logprobs * 0.9 for key, payload in payloads.items()}
        return {key: replace(payload, behaviour_logprobs=changed[key]) for key, payload in payloads.items()}

    return found


async def until_ready(texts: Any, starts: int) -> None:
    ends = time.monotonic() + 240
    while len(await texts("ready")) < starts:
        assert time.monotonic() < ends, f"start {starts} is not ready"
        await asyncio.sleep(0.05)
