"""A learner that is asked to stop: it writes the checkpoint that is owed, so that no step is trained again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.service import LearnerService
from learner.training.trainer import Trainer
from services.process.hosting import ServiceThread
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from tests.learner.running import end_ranks, put_batch, start_ranks, stop, submit, until_event, until_step

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]

RARELY = {"checkpoint_every": 100}


async def saved(runs_folder: Path, run: str) -> list[int]:
    """The steps that have a checkpoint."""
    found = await asyncio.to_thread(Checkpoints(RunArchive(runs_folder / run)).complete)
    return [checkpoint.step for checkpoint in found]


async def trained(redis: Any, keys: RunKeys) -> int:
    """How many steps are committed."""
    return len(await EventLog(redis, keys, "test").steps())


async def test_a_stop_between_two_steps_costs_no_training(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 5}, learner=RARELY)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    for version in range(2):
        await put_batch(redis, keys, version)
    await until_step(redis, keys, 2)
    await stop(thread)
    assert await saved(runs_folder, run_id) == [2]
    await redis.unlink(keys.events)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    ready = await until_event(redis, keys, "ready")
    await stop(thread)
    assert "at step 2, from the checkpoint of step 2 and 0 archived batches" in ready
    assert "bit-identical" in ready
    events = [event.phase for _, event in await EventLog(redis, keys, "test").events()]
    assert "checkpoint" not in events, "nothing was owed"


@pytest.mark.parametrize(
    ("optimizer_step", "grace_s", "steps", "checkpoints"),
    [(1, 60.0, 1, [1]), (2, 60.0, 2, [2]), (2, 0.0, 1, [])],
    ids=["before its first optimizer step", "it ends soon", "it takes long"],
)
async def test_a_stop_during_a_step(
    redis: Any,
    redis_url: str,
    run_id: str,
    tiny_model: Path,
    runs_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer_step: int,
    grace_s: float,
    steps: int,
    checkpoints: list[int],
) -> None:
    """A rollout step has two optimizer steps. What was changed by the first is the state of neither step."""
    keys, met = RunKeys(run_id), []
    token_loss = Trainer._token_loss

    def stopping(self: Trainer, *given: Any) -> Any:
        if self._rollout_steps == 1 and self.between_steps == (optimizer_step == 1) and not met:
            met.append(True)
            thread._grace_s = grace_s
            thread._loop.call_soon_threadsafe(thread._stopping.set)
            assert self._interrupted.wait(60)
        return token_loss(self, *given)

    monkeypatch.setattr(Trainer, "_token_loss", stopping)
    learner = RARELY | {"micro_batch_tokens": 16}  # several micro-batches for each optimizer step
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 5}, learner=learner)
    for version in range(2):
        await put_batch(redis, keys, version)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    await asyncio.to_thread(thread._thread.join, 240)
    assert not thread.alive
    assert thread.error is None
    assert met
    assert await trained(redis, keys) == steps
    assert await saved(runs_folder, run_id) == checkpoints


async def test_a_stop_before_the_export_costs_no_training(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    """The last rollout step has no checkpoint of its own, and its final evaluation may take long."""
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 1}, learner=RARELY)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    await put_batch(redis, keys, 0)
    await until_event(redis, keys, "awaiting-evaluation")
    await stop(thread)
    assert await saved(runs_folder, run_id) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("rollout_steps", [5, 1], ids=["in training", "before the export"])
async def test_a_notice_to_one_rank_stops_all_of_them(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, rollout_steps: int
) -> None:
    keys = RunKeys(run_id)
    limits = {"rollout_steps": rollout_steps}
    await submit(redis, run_id, tiny_model, limits=limits, learner=RARELY | {"ranks": 2})
    ranks = start_ranks(run_id, redis_url, 2)
    try:
        await put_batch(redis, keys, 0)
        await until_step(redis, keys, 1)
        if rollout_steps == 1:
            await until_event(redis, keys, "awaiting-evaluation")
        ranks[1].terminate()
        for rank in ranks:
            assert await asyncio.to_thread(rank.wait, 60) == 0, rank.output()
    finally:
        end_ranks(ranks)
    assert await saved(runs_folder, run_id) == [1]
