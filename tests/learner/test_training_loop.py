"""The loop of rank 0 without a policy: what follows the commit of a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from learner.coordinator.training_loop import TrainingLoop, step_record
from learner.training.trainer import Trained
from services.contracts import StepRecord
from services.streams.keys import RunKeys
from services.streams.state.policy_history import LoggedBatch
from tests.learner.committed import WRITER
from tests.services.driven import DrivenRun, batch_of, record_of, snapshot_at


class Schedule:
    """Checkpoints, of which the previous one is still being written. Keeps the saved snapshots."""

    overdue = False

    def __init__(self) -> None:
        self.waiting, self.written = asyncio.Event(), asyncio.Event()
        self.saved: list[Any] = []

    def committed(self, record: StepRecord) -> None:
        """The steps are not counted here."""

    async def settle(self) -> None:
        self.waiting.set()
        await self.written.wait()

    async def save(self, record: StepRecord, policy: Any, snapshot: Any) -> None:
        self.saved.append(snapshot)


class CommittingLoop(TrainingLoop):
    """Commits each step without training it."""

    async def _train(self, logged: LoggedBatch) -> StepRecord:
        version = await self._history.announce(logged.batch.step, "w1", 1)
        record = record_of(logged.batch, version)
        assert await self._history.commit_step(record, logged.entry)
        return record


async def test_a_batch_leaves_before_the_checkpoint_waits(redis: Any, run_id: str) -> None:
    keys = RunKeys(run_id)
    run = await DrivenRun.open(redis, keys)
    logged = await run.batched(1, "g0")

    async def send(_: Any) -> None:
        """There is no other rank."""

    worker: Any = SimpleNamespace(send=send, checkpoint_writer=SimpleNamespace(due=lambda step: True))
    context: Any = SimpleNamespace(redis=redis, keys=keys, record=SimpleNamespace(recipe=None))
    publication: Any = SimpleNamespace(history=run.learner, policy=SimpleNamespace(step=0))
    schedule: Any = Schedule()
    loop = CommittingLoop(context, worker, publication, schedule, done=False, world=1)
    handling = asyncio.create_task(loop._handle(logged))
    await asyncio.wait_for(schedule.waiting.wait(), 60)
    assert await run.learner.batches() == []
    assert await run.archived() == ["g0"], "its payloads may leave Redis, once its groups are archived"
    schedule.written.set()
    await asyncio.wait_for(handling, 60)
    assert schedule.saved == [snapshot_at(1)], "the checkpoint needs what the release leaves"


def test_a_record_has_the_facts_of_each_group_in_its_place() -> None:
    batch = batch_of(RunKeys("r"), 4, ["g0", "g1", "g2"])
    facts = [("g0", "p7", 2), ("g1", "p3", 0), ("g2", "p5", 1)]
    groups = tuple(
        group.model_copy(update={"prompt": prompt, "staleness": staleness})
        for group, (_, prompt, staleness) in zip(batch.groups, facts, strict=True)
    )
    trained = Trained({}, (), step_of={"g2": 1, "g0": 2})
    record = step_record(batch.model_copy(update={"groups": groups}), trained, 3, 1.0, WRITER, 1e-6)
    assert list(zip(record.groups, record.prompts, record.staleness, strict=True)) == facts
    assert record.optimizer_step_of == (2, None, 1)
    assert (record.step, record.version) == (4, 3)
