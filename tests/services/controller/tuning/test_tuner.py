"""Tuning as the controller does it: from step records to edits, events and metrics."""

import time
from contextlib import asynccontextmanager

from services.contracts import Lane, RunState, StepRecord
from services.metrics import TUNING_DECISIONS, TUNING_IDLE, TUNING_IDLE_TARGET
from services.settings.cluster_limits import VARIABLE
from services.streams.keys import RunKeys
from services.streams.runs.edits import check_edit, edit_run
from services.streams.state.events import EventLog, append_message
from services.streams.state.heartbeat import Heartbeat
from tests.services.controller.hand_cluster import controlled, events_of, replica, until, until_state

IDLE_S, WALL_S = 4.0, 10.0
TUNING = {"mode": "on", "inflight_groups": [8, 64], "replicas": [1, 3], "cool_down_steps": 2}


class Learner:
    """Commits rollout steps that waited IDLE_S of WALL_S for their batch."""

    def __init__(self, redis, run):
        self.redis, self.keys, self.step = redis, RunKeys(run), 0
        self.started = time.time()

    async def commit(self, count=1):
        for _ in range(count):
            self.step += 1
            finished = self.started + WALL_S * self.step
            record = StepRecord(
                step=self.step,
                version=self.step,
                optimizer_steps=1,
                groups=("a", "b", "c", "d"),
                staleness=(0, 0, 1, 1),
                metrics={"batch_wait_seconds": IDLE_S, "trained_tokens": 100.0, "groups_kept": 4.0},
                generation_started_at=finished - 9,
                generation_finished_at=finished - 3,
                learning_started_at=finished - 2,
                learning_finished_at=finished,
            )
            await self.redis.hset(self.keys.policy, mapping={"version": self.step, "step": self.step})
            await append_message(self.redis, self.keys, self.keys.steps, record, 0)


@asynccontextmanager
async def tuned(redis, run, folder, **settings):
    """A running run whose controller has read two rollout steps, so that it knows the newest one."""
    async with (
        controlled(redis, run, folder, tuning=TUNING | settings, limits={"rollout_steps": 50}) as (records, cluster),
        Heartbeat(redis, replica(run)),
    ):
        await until_state(records, run, RunState.RUNNING)
        await two_looks(cluster)
        learner = Learner(redis, run)
        await learner.commit()
        await two_looks(cluster)
        yield records, cluster, learner


async def two_looks(cluster):
    before = cluster.looks
    await until(lambda: cluster.looks >= before + 2)


def moves(run, knob, mode):
    return TUNING_DECISIONS.labels(run, knob, "up", mode)._value.get()


async def test_a_decision_is_an_edit_an_event_and_a_metric(redis, run_id, tmp_path):
    async with tuned(redis, run_id, tmp_path, replicas=None) as (records, cluster, learner):
        assert await redis.sadd(RunKeys(run_id).lane(Lane.TRAIN).pending, *(f"g{n}" for n in range(32))) == 32
        await two_looks(cluster)
        for _ in range(2):
            await learner.commit()
            await two_looks(cluster)
        record = await records.get(run_id)
        assert record.recipe.limits.max_inflight_groups == 62
        [edit] = record.edits
        assert (edit.by, edit.step, edit.changes) == ("controller", 3, {"limits.max_inflight_groups": (32, 62)})
        [text] = await events_of(redis, run_id, "tuning")
        assert text.startswith("limits.max_inflight_groups 32 -> 62: the learner idled 40% (target 5%), replicas")
        assert text.endswith("(after rollout step 3)")
        assert moves(run_id, "max_inflight_groups", "on") == 1
        assert TUNING_IDLE.labels(run_id)._value.get() == IDLE_S / WALL_S
        assert TUNING_IDLE_TARGET.labels(run_id)._value.get() == 0.05
        await learner.commit(2)
        await two_looks(cluster)
        assert len((await records.get(run_id)).edits) == 1, "it cools down"


async def test_a_report_changes_nothing(redis, run_id, tmp_path):
    async with tuned(redis, run_id, tmp_path, mode="report") as (records, cluster, learner):
        await learner.commit(2)
        await until(lambda: moves(run_id, "replicas", "report"))
        record = await records.get(run_id)
        assert (record.edits, record.rollout_replicas) == ((), 1)
        await two_looks(cluster)
        [text] = await events_of(redis, run_id, "tuning")
        assert text.startswith("would move rollout.replicas 1 -> 2: the learner idled 40% (target 5%)")
        await edit_run(redis, record, check_edit(record, {"tuning.mode": "on"}), "test")
        await two_looks(cluster)
        await learner.commit(2)
        await until(lambda: "scale 2" in cluster.requests)  # what was only told does not rest


async def test_replicas_move_within_the_cluster(redis, run_id, tmp_path, monkeypatch):
    pods = '{"pods": 2, "cpus": 1, "gpus": 0}'
    limits = tmp_path / "limits.json"
    limits.write_text(f'{{"cpu": {pods}, "verifier": {pods}, "rollout": {pods}, "learner": {pods}}}')
    monkeypatch.setenv(VARIABLE, str(limits))
    async with tuned(redis, run_id, tmp_path, replicas=[1, 8]) as (records, cluster, learner):
        await learner.commit(2)
        await until(lambda: "scale 2" in cluster.requests)
        assert (await records.get(run_id)).rollout_replicas == 2
        monkeypatch.setenv(VARIABLE, str(tmp_path / "missing.json"))
        await learner.commit(20)
        await two_looks(cluster)
        assert (await records.get(run_id)).rollout_replicas == 2, "what the cluster allows is not known"


async def test_someone_elses_edit_wins(redis, run_id, tmp_path, monkeypatch):
    tried = []

    async def beaten(redis, record, edited, by):
        if not tried:
            tried.append(edited)
            await edit_run(redis, record, check_edit(record, {"rollout.replicas": 3}), "someone")
        return await edit_run(redis, record, edited, by)

    monkeypatch.setattr("services.controller.tuning.tuner.edit_run", beaten)
    async with tuned(redis, run_id, tmp_path) as (records, cluster, learner):
        await learner.commit(2)
        await until(lambda: "scale 3" in cluster.requests)
        await learner.commit(3)
        await two_looks(cluster)
        [edit] = (await records.get(run_id)).edits
        assert edit.by == "someone"
        assert await events_of(redis, run_id, "tuning") == []


async def test_the_mode_changes_in_flight(redis, run_id, tmp_path):
    async with tuned(redis, run_id, tmp_path, mode="off") as (records, cluster, learner):
        await learner.commit(4)
        await two_looks(cluster)
        record = await records.get(run_id)
        assert record.edits == ()
        await edit_run(redis, record, check_edit(record, {"tuning.mode": "on"}), "test")
        await two_looks(cluster)
        await learner.commit(2)
        await until(lambda: "scale 2" in cluster.requests)
        texts = [event.text for _, event in await EventLog(redis, RunKeys(run_id), "test").events()]
        assert any(text.startswith("rollout.replicas 1 -> 2: ") for text in texts)
