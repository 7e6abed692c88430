"""The controller carries runs to their end; the test plays the cluster."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from services.contracts import EvaluationRecord, Lane, ProcessInfo, Prompt, RunState, Sampling, Task
from services.controller.service import Controller
from services.settings import parse_recipe
from services.streams.effects import Effects
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.presence import Presence
from services.streams.records import RunRecords
from tests.conftest import recipe_document


class HandCluster:
    """Does what the test says; remembers what it was asked."""

    def __init__(self, only):
        self.only = only
        self.asked = []
        self.fault = []
        self.short = None

    async def prepare_model(self, record):
        self.asked.append("prepare")
        return "/prepared"

    async def start(self, record):
        self.asked.append(f"start {record.model_path}")

    async def scale_rollout(self, run, replicas):
        self.asked.append(f"scale {replicas}")

    async def faults(self, run):
        return self.fault

    async def shortage(self, record):
        return self.short

    async def stop(self, run, deadline_s):
        self.asked.append("stop")


@asynccontextmanager
async def controlled(redis, run, tmp_path, **sections):
    """A submitted run under a controller that sees no other run."""
    records = RunRecords(redis)
    for record in await records.all():
        if not record.state.ended:
            await records.transition(record.id, RunState.CANCELLED, "left by another test")
    await records.create(run, parse_recipe(recipe_document("/model", **sections)))
    cluster = HandCluster(run)
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, cluster, tmp_path).run(stopping))
    try:
        yield records, cluster
    finally:
        stopping.set()
        await loop


async def until_state(records, run, *states):
    ends = time.monotonic() + 20
    while (record := await records.get(run)).state not in states:
        assert time.monotonic() < ends, f"{run} is {record.state}, not {states}: {record.reason}"
        await asyncio.sleep(0.05)
    return record


def replica(run, state="ready", version=0):
    return ProcessInfo(id="rollout-1", service="rollout", run=run, host="h", pid=1, metrics="h:1", state=state,
                       version=version)  # fmt: skip


async def evaluate(redis, run, name, accuracy, kind="held-out"):
    record = EvaluationRecord(
        name=name,
        set=kind,
        version=0,
        prompts=8,
        samples_per_prompt=2,
        accuracy=accuracy,
        standard_error=0.1,
        unknown=0,
    )
    await Journal(redis, RunKeys(run), "test").evaluation(record)


async def test_life_of_a_run(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        async with Presence(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
            await records.scale(run_id, 2)
            await evaluate(redis, run_id, "before", 0.25)
            await evaluate(redis, run_id, "after", 0.75)
            await asyncio.sleep(1.2)
            assert (await records.get(run_id)).state is RunState.RUNNING, "not done before the export"
            await records.set_paths(run_id, export_path="/exported")
            record = await until_state(records, run_id, RunState.SUCCEEDED)
    assert cluster.asked == ["prepare", "start /prepared", "scale 2", "stop"]
    assert [change.state for change in record.history] == ["queued", "starting", "running", "succeeded"]
    summary = json.loads((tmp_path / run_id / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["export_path"] == "/exported"
    assert summary["groups"]["reconciled"] is True


async def test_run_is_done_once_every_set_has_its_last_evaluation(redis, run_id, tmp_path):
    aime = {"name": "aime", "source": "jsonl", "path": "/aime.jsonl"}
    async with (
        controlled(redis, run_id, tmp_path, evaluation={"sets": [aime]}) as (records, _),
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await records.set_paths(run_id, export_path="/exported")
        for kind, name, accuracy in (("aime", "before", 0.1), ("held-out", "before", 0.25), ("held-out", "after", 0.5)):
            await evaluate(redis, run_id, name, accuracy, kind)
        await asyncio.sleep(1.2)
        assert (await records.get(run_id)).state is RunState.RUNNING, "not done before the other set"
        await evaluate(redis, run_id, "after", 0.2, "aime")
        record = await until_state(records, run_id, RunState.SUCCEEDED)
    assert (record.summary["accuracy_before"], record.summary["accuracy_after"]) == (0.25, 0.5)
    found = {
        (kind, name): one["accuracy"] for kind, by_name in record.summary["evaluations"].items()
        for name, one in by_name.items()
    }  # fmt: skip
    assert found == {
        ("aime", "before"): 0.1, ("aime", "after"): 0.2, ("held-out", "before"): 0.25, ("held-out", "after"): 0.5,
    }  # fmt: skip


async def test_run_of_no_rollout_steps_needs_no_learner_and_no_export(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path, limits={"rollout_steps": 0}) as (records, _):
        async with Presence(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
            await evaluate(redis, run_id, "evaluation", 0.25)
            record = await until_state(records, run_id, RunState.SUCCEEDED)
        events = {event.phase: event.text for _, event in await Journal(redis, RunKeys(run_id), "test").events()}
    assert record.reason == "evaluated; limits.rollout_steps = 0 trains nothing"
    assert record.summary["evaluations"]["held-out"]["evaluation"]["accuracy"] == 0.25
    assert record.summary["accuracy_after"] is None
    assert events["starting-services"] == "sampler, verifier, rollout"


async def test_a_long_evaluation_is_progress(redis, run_id, tmp_path):
    effects = Effects(redis, RunKeys(run_id), "sampler")
    prompt = Prompt(id="p", messages=(), verifier="math", reference={})
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1)
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 2.0}) as (records, _),
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        for number in range(8):
            task = Task(group=f"e.x.before.{number}", prompt=prompt, samples=1, sampling=sampling)
            await effects.dispatch(Lane.EVALUATION, task, None)
            await asyncio.sleep(0.5)
        assert (await records.get(run_id)).state is RunState.RUNNING, "every half second one more prompt"
        record = await until_state(records, run_id, RunState.FAILED)
    assert "no progress for 2 s" in record.reason
    assert "8 of 8 evaluation prompts pending" in record.reason


async def test_run_waits_for_room_and_says_why(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        cluster.short = "needs 8 GPUs, 0 are free"
        await asyncio.sleep(1.2)
        cluster.short = None
        await until_state(records, run_id, RunState.STARTING)
        events = [event.text for _, event in await Journal(redis, RunKeys(run_id), "test").events()]
    assert "needs 8 GPUs, 0 are free" in events


async def test_cancel_stops_everything(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
    assert cluster.asked[-1] == "stop"


async def test_fault_fails_the_run_with_its_reason(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == "learner rank 0 died"
    assert cluster.asked[-1] == "stop"


@pytest.mark.parametrize(
    ("limits", "announce", "says"),
    [
        ({"startup_timeout_s": 1.0}, False, "limits.startup_timeout_s): learner, rollout, sampler, verifier"),
        ({"startup_timeout_s": 1.0, "rollout_steps": 0}, False, "startup_timeout_s): rollout, sampler, verifier"),
        ({"stall_timeout_s": 1.0}, True, "no progress for 1 s"),
    ],
)
async def test_deadlines_end_a_run_and_name_what_is_missing(redis, run_id, tmp_path, limits, announce, says):
    async with controlled(redis, run_id, tmp_path, limits=limits) as (records, _):
        if announce:
            async with Presence(redis, replica(run_id)):
                record = await until_state(records, run_id, RunState.FAILED)
        else:
            record = await until_state(records, run_id, RunState.FAILED)
    assert says in record.reason


async def test_unfinished_run_is_taken_up_by_the_next_controller(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, first):
        await until_state(records, run_id, RunState.STARTING)
    assert first.asked[-1] == "stop"
    second = HandCluster(run_id)
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, second, tmp_path).run(stopping))
    async with Presence(redis, replica(run_id)):
        await until_state(records, run_id, RunState.RUNNING)
    stopping.set()
    await loop
    assert second.asked[0] == "start /prepared"
