"""The loop of rank 0 without a policy: a step is published and committed while the next batch is in training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.coordinator.publication import Publication
from learner.coordinator.training_loop import TrainingLoop, step_record
from learner.coordinator.waiting import LearnerStoppingError
from learner.training.trainer import Trained
from learner.weight_sync.snapshot import BucketSums, Snapshot
from services.contracts import CommittedPolicy, StepRecord, WeightManifest
from services.streams.keys import RunKeys
from services.streams.state.policy_history import read_policy
from tests.harness.small_run import recipe_document, service_context
from tests.learner.committed import WRITER
from tests.services.driven import DrivenRun, batch_of, snapshot_at

MOST_S = 60.0


class Fleet:
    """A publisher whose fleet holds a version once `holds` is set; `error`: what its publication raises instead."""

    def __init__(self) -> None:
        self.asked, self.holds = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    def check(self) -> None:
        """The publisher itself works."""

    async def publish(self, snapshot: Snapshot) -> float:
        self.asked.set()
        await self.holds.wait()
        if self.error:
            raise self.error
        return 1.5


class Schedule:
    """Checkpoints. The one before is written once `written` is set. Keeps what is saved.

    `every`: whether each committed step makes one due.
    """

    overdue = owed = every = False

    def __init__(self) -> None:
        self.waiting, self.written = asyncio.Event(), asyncio.Event()
        self.saved: list[tuple[StepRecord, CommittedPolicy, Any]] = []

    def committed(self, record: StepRecord) -> None:
        self.overdue = self.every

    async def settle(self) -> None:
        self.waiting.set()
        await self.written.wait()

    async def save(self, record: StepRecord, policy: CommittedPolicy, snapshot: Any) -> None:
        self.saved.append((record, policy, snapshot))
        self.overdue = False


class Ranks:
    """A rank alone: its training notes what it does, and holds before the update as the trainer does."""

    stopping = False
    between_steps = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.done: list[str] = []
        self.interrupted = False
        self.training = self.archive = self
        self.checkpoint_writer = SimpleNamespace(due=lambda step: step in self.due)
        self.due: set[int] = set()

    async def send(self, command: Any) -> None:
        """There is no other rank."""

    async def snapshot(self) -> Snapshot:
        return Snapshot.of(-1, WeightManifest(buckets=()), (), [BucketSums(len(self.done), len(self.done))])

    async def train(self, batch: Any, *_: Any, before_update: Callable[[], None], **__: Any) -> Trained | None:
        self.done.append(f"forward {batch.step}")
        if self.interrupted:
            return None
        await asyncio.to_thread(before_update)
        self.done.append(f"update {batch.step}")
        return Trained({}, ())

    def write_record(self, record: StepRecord) -> None:
        self.done.append(f"record {record.step}")


@dataclass
class Loop:
    """A loop around a run on a real server."""

    run: DrivenRun
    keys: RunKeys
    loop: TrainingLoop
    publication: Publication
    fleet: Fleet = field(default_factory=Fleet)
    ranks: Ranks = field(default_factory=Ranks)
    schedule: Schedule = field(default_factory=Schedule)

    async def committed(self, step: int) -> None:
        await until(lambda: self.publication.policy.step >= step)

    async def did(self, what: str) -> None:
        await until(lambda: what in self.ranks.done)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(MOST_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(redis: Any, run_id: str) -> AsyncIterator[Loop]:
    keys, fleet, ranks, schedule = RunKeys(run_id), Fleet(), Ranks(), Schedule()
    async with service_context(redis, run_id, recipe_document("/nowhere"), "learner") as context:
        run = await DrivenRun.open(redis, keys, new=False)
        worker: Any = ranks
        publication = Publication(context, worker, run.learner, fleet)  # type: ignore[arg-type]
        loop = TrainingLoop(context, worker, publication, schedule, done=False, world=1)  # type: ignore[arg-type]
        try:
            yield Loop(run, keys, loop, publication, fleet, ranks, schedule)
        finally:
            await publication.close()


async def test_the_next_batch_trains_during_the_publication(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        first = await at.run.batched(1, "g0")
        await asyncio.wait_for(at.loop._handle(first), MOST_S)
        await asyncio.wait_for(at.fleet.asked.wait(), MOST_S)
        second = await at.run.batched(2, "g1")
        handling = asyncio.create_task(at.loop._handle(second))
        await at.did("forward 2")
        assert await read_policy(redis, at.keys) is None, "the fleet does not hold version 1 yet"
        assert (at.publication.policy.step, at.publication.latest.step) == (0, 1)
        await asyncio.sleep(0.2)
        assert "update 2" not in at.ranks.done, "the policy stays that of step 1 until step 1 is committed"
        at.fleet.holds.set()
        await asyncio.wait_for(handling, MOST_S)
        await at.committed(2)
        assert at.ranks.done.index("forward 2") < at.ranks.done.index("record 1")
        assert at.ranks.done[:2] == ["forward 1", "update 1"]
        record = at.publication.record
        assert record is not None
        assert record.metrics["commit_wait_seconds"] > 0.1
        assert record.metrics["publish_seconds"] == 1.5


async def test_no_update_follows_a_failed_publication(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        await asyncio.wait_for(at.loop._handle(await at.run.batched(1, "g0")), MOST_S)
        second = await at.run.batched(2, "g1")
        handling = asyncio.create_task(at.loop._handle(second))
        await at.did("forward 2")
        at.fleet.error = ConnectionAbortedError("the fleet is gone")
        at.fleet.holds.set()
        with pytest.raises(ConnectionAbortedError, match="the fleet is gone"):
            await asyncio.wait_for(handling, MOST_S)
        assert "update 2" not in at.ranks.done
        with pytest.raises(ConnectionAbortedError, match="the fleet is gone"):
            at.publication.check()


async def test_a_learner_stops_after_the_commit_in_flight(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        at.schedule.written.set()
        await asyncio.wait_for(at.loop._handle(await at.run.batched(1, "g0")), MOST_S)
        second = await at.run.batched(2, "g1")
        at.ranks.interrupted = at.schedule.owed = True
        handling = asyncio.create_task(at.loop._handle(second))
        await at.did("forward 2")
        assert at.schedule.saved == []
        at.fleet.holds.set()
        with pytest.raises(LearnerStoppingError):
            await asyncio.wait_for(handling, MOST_S)
        [(record, policy, snapshot)] = at.schedule.saved
        assert (record.step, policy.step, snapshot) == (1, 1, snapshot_at(1))


async def test_a_batch_leaves_before_the_checkpoint_waits(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        at.fleet.holds.set()
        at.ranks.due = {1}
        handling = asyncio.create_task(at.loop._handle(await at.run.batched(1, "g0")))
        await asyncio.wait_for(at.schedule.waiting.wait(), MOST_S)
        assert await at.run.learner.batches() == []
        assert await at.run.archived() == ["g0"], "its payloads may leave Redis, once its groups are archived"
        at.schedule.written.set()
        await asyncio.wait_for(handling, MOST_S)
        [(record, policy, snapshot)] = at.schedule.saved
        assert snapshot == snapshot_at(1), "the checkpoint needs what the release leaves"
        assert record.step == policy.step == 1


async def test_a_checkpoint_waits_for_the_commit_of_its_step(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        at.ranks.due = {1}
        at.schedule.written.set()
        handling = asyncio.create_task(at.loop._handle(await at.run.batched(1, "g0")))
        await asyncio.wait_for(at.fleet.asked.wait(), MOST_S)
        await asyncio.sleep(0.1)
        assert at.schedule.saved == []
        at.fleet.holds.set()
        await asyncio.wait_for(handling, MOST_S)
        assert at.schedule.saved[0][1].step == 1


async def test_the_last_step_may_make_a_checkpoint_due(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        at.schedule.every = True
        at.schedule.written.set()
        await at.run.batched(1, "g0", last=True)
        running = asyncio.create_task(at.loop.run())
        await asyncio.wait_for(at.fleet.asked.wait(), MOST_S)
        await asyncio.sleep(0.1)
        assert at.schedule.saved == []
        at.fleet.holds.set()
        await asyncio.wait_for(running, MOST_S)
        assert [record.step for record, _, _ in at.schedule.saved] == [1]


async def test_a_commit_during_the_look_is_no_lost_step(redis: Any, run_id: str) -> None:
    async with opened(redis, run_id) as at:
        read = at.loop._history.policy

        async def slow() -> CommittedPolicy | None:
            found = await read()
            at.fleet.holds.set()
            await at.committed(1)
            return found

        await asyncio.wait_for(at.loop._handle(await at.run.batched(1, "g0")), MOST_S)
        at.loop._history.policy = slow  # type: ignore[method-assign]
        await asyncio.wait_for(at.loop._check_redis(), MOST_S)
        assert at.publication.policy.step == 1


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
