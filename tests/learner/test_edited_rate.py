"""A learning rate that is edited in flight: which steps it counts for, also when they are trained again or replayed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.rank.checkpoint_writer import CheckpointWriter
from learner.recovery.replay import plan_replay, replay
from learner.service import LearnerService
from services.process.hosting import ServiceThread
from services.streams.keys import RunKeys
from services.streams.runs.edits import check_edit, edit_run
from services.streams.state.events import EventLog
from services.streams.state.run_record import LEARNING_RATE
from services.streams.state.runs import RunRecords
from tests.learner.running import put_batch, stop, submit, until_step

pytestmark = [
    pytest.mark.xdist_group("learner-replay"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]


async def test_each_step_keeps_the_rate_it_was_trained_with(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, records, event_log = RunKeys(run_id), RunRecords(redis), EventLog(redis, RunKeys(run_id), "test")
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 6}, learner={"warmup_rollout_steps": 2})
    monkeypatch.setattr(CheckpointWriter, "due", lambda *_: False)
    monkeypatch.setattr(CheckpointSchedule, "overdue", False)
    monkeypatch.setattr(CheckpointSchedule, "owed", False)

    @asynccontextmanager
    async def learner() -> AsyncIterator[None]:
        thread = ServiceThread(LearnerService(), run_id, redis_url)
        try:
            yield
        finally:
            await stop(thread)

    async def edit(rate: float) -> None:
        record = await records.get(run_id)
        await edit_run(redis, record, check_edit(record, {LEARNING_RATE: rate}), "test")

    async with learner():
        for version, rate in enumerate((None, 5e-4, None, 1e-5)):
            if rate:
                await edit(rate)
            await put_batch(redis, keys, version)
            await until_step(redis, keys, version + 1)
    steps = [step for _, step in await event_log.steps()]
    assert [step.learning_rate for step in steps] == [1e-3, 5e-4, 5e-4, 1e-5]
    assert [step.metrics["learning_rate"] for step in steps] == pytest.approx([5e-4, 5e-4, 5e-4, 1e-5]), "warm-up"
    texts = [event.text for _, event in await event_log.events() if event.phase == "rate-edited"]
    assert texts == [
        "learner.learning_rate 0.001 -> 0.0005 from rollout step 2 on",
        "learner.learning_rate 0.0005 -> 1e-05 from rollout step 4 on",
    ]
    # All steps are trained again from the model, because there is no checkpoint.
    async with learner():
        await put_batch(redis, keys, 4)
        await until_step(redis, keys, 5)
    ready = [event.text for _, event in await event_log.events() if event.phase == "ready"][-1]
    assert "from the model and 4 archived batches" in ready
    assert ready.endswith("(bit-identical to the committed one)")
    assert not [event for _, event in await event_log.events() if event.phase == "retrained-differs"]
    folder = runs_folder / run_id
    assert RunArchive(folder).facts().recipe.learner.learning_rate == 1e-5
    rows = replay(folder, plan_replay(folder, 5), 240.0, lambda _: None)
    assert [row.equal for row in rows] == [True] * len(rows)
    assert {row.step for row in rows} == {1, 2, 3, 4, 5}
