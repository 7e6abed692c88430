"""The controller brings runs to their end; the test acts as the cluster."""

import asyncio
import json
from unittest.mock import AsyncMock

import pytest

from services.contracts import Lane, Prompt, RunState, Sampling, Task
from services.controller import run as run_module
from services.controller.health import Silence
from services.controller.service import Controller
from services.settings.cluster_limits import VARIABLE
from services.storage.errors import StoreOutageError
from services.storage.mirror import run_mirror
from services.streams.connection.client import RedisOutageError
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.ownership import become_owner
from tests.services.controller.hand_cluster import (
    HandCluster,
    controlled,
    evaluate,
    events_of,
    first_event,
    replica,
    until,
    until_state,
)


async def test_life_of_a_run(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        async with Heartbeat(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
            await records.scale(run_id, 2)
            await evaluate(redis, run_id, "before", 0.25)
            await evaluate(redis, run_id, "after", 0.75)
            await asyncio.sleep(1.2)
            assert (await records.get(run_id)).state is RunState.RUNNING, "the run ends after the export"
            await records.set_paths(run_id, export_path="/exported")
            record = await until_state(records, run_id, RunState.SUCCEEDED)
    assert cluster.requests == ["prepare", "start /prepared", "scale 2", "stop"]
    assert [change.state for change in record.history] == ["queued", "starting", "running", "succeeded"]
    summary = json.loads((tmp_path / run_id / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["export_path"] == "/exported"
    assert summary["groups"]["reconciled"] is True


async def test_preparing_the_model_retries_an_unavailable_store(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path, limits={"startup_timeout_s": 30.0}) as (records, cluster):
        cluster.failing["prepare"] = [StoreOutageError("the store does not answer")] * 2
        await until(lambda: "start /prepared" in cluster.requests)
    assert cluster.requests.count("prepare") == 3
    assert (await records.get(run_id)).state is RunState.STARTING


async def test_a_run_ends_with_the_last_evaluation_of_every_set(redis, run_id, tmp_path):
    aime = {"name": "aime", "source": "jsonl", "path": "/aime.jsonl"}
    async with (
        controlled(redis, run_id, tmp_path, evaluation={"sets": [aime]}) as (records, _),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await records.set_paths(run_id, export_path="/exported")
        for kind, name, accuracy in (("aime", "before", 0.1), ("held-out", "before", 0.25), ("held-out", "after", 0.5)):
            await evaluate(redis, run_id, name, accuracy, kind)
        await asyncio.sleep(1.2)
        assert (await records.get(run_id)).state is RunState.RUNNING, (
            "the run ends after the last evaluation of both sets"
        )
        await evaluate(redis, run_id, "after", 0.2, "aime")
        record = await until_state(records, run_id, RunState.SUCCEEDED)
    assert (record.summary["accuracy_before"], record.summary["accuracy_after"]) == (0.25, 0.5)
    accuracies = {
        kind: {name: evaluation["accuracy"] for name, evaluation in by_name.items()}
        for kind, by_name in record.summary["evaluations"].items()
    }
    assert accuracies == {"aime": {"before": 0.1, "after": 0.2}, "held-out": {"before": 0.25, "after": 0.5}}


async def test_an_evaluation_run_needs_no_learner_and_no_export(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path, limits={"rollout_steps": 0}) as (records, _):
        async with Heartbeat(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
            await evaluate(redis, run_id, "evaluation", 0.25)
            record = await until_state(records, run_id, RunState.SUCCEEDED)
        events = {event.phase: event.text for _, event in await EventLog(redis, RunKeys(run_id), "test").events()}
    assert record.reason == "evaluated; limits.rollout_steps = 0 trains nothing"
    assert record.summary["evaluations"]["held-out"]["evaluation"]["accuracy"] == 0.25
    assert record.summary["accuracy_after"] is None
    assert events["starting-services"] == "sampler, rollout, verifier"


async def test_a_long_evaluation_is_progress(redis, run_id, tmp_path):
    prompt = Prompt(id="p", messages=(), verifier="math", reference={})
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1)
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 8.0}) as (records, _),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
        for number in range(10):
            task = Task(group=f"e.x.before.{number}", prompt=prompt, samples=1, sampling=sampling)
            await transitions.dispatch(Lane.EVALUATION, [task], None)
            await asyncio.sleep(1.0)
        assert (await records.get(run_id)).state is RunState.RUNNING, "one more prompt per second is progress"
        record = await until_state(records, run_id, RunState.FAILED)
    assert "no progress for 8 s" in record.reason
    assert "10 of 10 evaluation prompts pending" in record.reason


async def test_a_run_waits_for_room_and_reports_why(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        cluster.short = "needs 8 GPUs, 0 are free"
        assert await first_event(redis, run_id, "queued") == "needs 8 GPUs, 0 are free"
        assert cluster.requests == []
        cluster.short = None
        await until_state(records, run_id, RunState.STARTING)


async def test_a_paused_run_does_not_stall_and_can_be_resumed(redis, run_id, tmp_path):
    keys = RunKeys(run_id)
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 8.0}) as (records, _),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await records.request_pause(run_id)
        await until_state(records, run_id, RunState.PAUSED)
        await asyncio.sleep(9.0)
        assert (await records.get(run_id)).state is RunState.PAUSED, "a pause is not a stall"
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        await redis.set(keys.starved, "512 groups judged, 0 of 4 kept; 512 with 0")
        record = await until_state(records, run_id, RunState.PAUSED)
        assert record.reason == "512 groups judged, 0 of 4 kept; 512 with 0"
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        assert await redis.exists(keys.starved) == 0
        texts = await events_of(redis, run_id, "paused")
    assert texts[0] == f"paused on request; resume it with `penstock resume {run_id}`"


async def test_a_run_that_failed_is_resumed(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        await until_state(records, run_id, RunState.FAILED)
        cluster.fault = []
        await records.resume(run_id)
        async with Heartbeat(redis, replica(run_id)):
            record = await until_state(records, run_id, RunState.RUNNING)
    states = [change.state for change in record.history]
    assert states == ["queued", "starting", "failed", "queued", "starting", "running"]
    assert record.resumptions == 1
    assert [request for request in cluster.requests if request != "stop"] == [
        "prepare",
        "start /prepared",
        "start /prepared",
    ]


async def test_a_fenced_controller_writes_nothing(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        await become_owner(redis, RunKeys(run_id), "controller")
        cluster.fault = ["seen only by the previous controller"]
        await asyncio.sleep(1.0)
        # Its own controller resumes the run, as the owner.
        record = await until_state(records, run_id, RunState.FAILED)
    assert [change.state for change in record.history] == ["queued", "starting", "failed"]


async def test_a_resumed_run_stops_processes_left_from_before(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until(lambda: "start /prepared" in cluster.requests)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
        cluster.requests.clear()
        await records.resume(run_id)
        await until_state(records, run_id, RunState.STARTING)
        await until(lambda: "start /prepared" in cluster.requests)
    assert cluster.requests[:2] == ["stop", "start /prepared"]


async def test_cancel_stops_everything(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
    assert cluster.requests[-1] == "stop"


async def test_fault_fails_the_run_with_its_reason(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == "learner rank 0 died"
    assert cluster.requests[-1] == "stop"


async def test_the_summary_is_stored_after_the_services_stopped(redis, run_id, tmp_path, store, monkeypatch):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        requests = []
        monkeypatch.setattr(run_module, "run_mirror", lambda run: requests.extend(cluster.requests) or run_mirror(run))
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        await until_state(records, run_id, RunState.FAILED)
    assert requests[-1] == "stop"
    assert run_mirror(run_id).read("summary.json") == (tmp_path / run_id / "summary.json").read_bytes()


async def test_a_run_ends_although_the_store_is_unavailable(redis, run_id, tmp_path, own_store):
    own_store.kill()
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        await until_state(records, run_id, RunState.FAILED)
        assert len(await events_of(redis, run_id, "summary-not-stored")) == 1
    assert (tmp_path / run_id / "summary.json").is_file()


async def test_a_queued_run_waits_while_limits_are_unreadable(redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text("half a fi")
    monkeypatch.setenv(VARIABLE, str(path))
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        assert "Invalid JSON" in await first_event(redis, run_id, "queued")
        assert cluster.requests == []
        monkeypatch.delenv(VARIABLE)
        await until_state(records, run_id, RunState.STARTING)


async def test_a_running_run_is_resumed_with_unreadable_limits(redis, run_id, tmp_path, monkeypatch):
    path = tmp_path / "bounds.json"
    path.write_text("half a fi")
    monkeypatch.setenv(VARIABLE, str(path))
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await records.transition(run_id, RunState.RUNNING, "as the previous controller left it")
        await until(lambda: any(request.startswith("start ") for request in cluster.requests))


def test_an_outage_of_redis_does_not_count_as_silence(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("services.controller.health.time.monotonic", lambda: clock[0])
    silence = Silence("sampler", 1)
    assert silence.observe(["a"], startup_s=60) is None
    clock[0] += 300  # Redis was unavailable, and every heartbeat has lapsed
    assert silence.observe([], startup_s=60) is None
    clock[0] += 2
    assert silence.observe(["a"], startup_s=60) is None
    for _ in range(20):
        clock[0] += 1
        assert silence.observe([], startup_s=60) is None
    clock[0] += 1
    assert silence.observe([], startup_s=60) == "sampler: 1 of 1 processes silent for 31 s"
    silence.restart(["a"])
    for _ in range(59):
        clock[0] += 1
        assert silence.observe(["a"], startup_s=60) is None, "the previous process, whose heartbeat has not lapsed"
    clock[0] += 2
    assert silence.observe([], startup_s=60) == "sampler: 1 of 1 processes silent for 61 s"


async def test_a_fault_includes_the_last_failure_event(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        event_log = EventLog(redis, RunKeys(run_id), "verifier")
        await event_log.write("service-failed", "verifier-1: RuntimeError: no sandbox")
        cluster.fault = ["verifier fleet: 6 replicas in a row died before they were ready"]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == (
        "verifier fleet: 6 replicas in a row died before they were ready; verifier-1: RuntimeError: no sandbox"
    )


async def test_a_run_survives_a_long_outage_of_redis(redis, run_id, tmp_path, monkeypatch):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        outage = RedisOutageError("Redis at redis://h:1/0 has been unavailable for 60 s: refused")
        monkeypatch.setattr(cluster, "faults", AsyncMock(side_effect=outage))
        await until(lambda: cluster.faults.await_count >= 2)
        assert (await records.get(run_id)).state is RunState.STARTING, (
            "the run has not failed; it gets a new controller"
        )
        monkeypatch.undo()
        async with Heartbeat(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
    assert cluster.requests[:3] == ["prepare", "start /prepared", "start /prepared"]


@pytest.mark.parametrize(
    ("limits", "announce", "reason"),
    [
        ({"startup_timeout_s": 1.0}, False, "limits.startup_timeout_s): learner, rollout, sampler, verifier"),
        ({"startup_timeout_s": 1.0, "rollout_steps": 0}, False, "startup_timeout_s): rollout, sampler, verifier"),
        ({"stall_timeout_s": 1.0}, True, "no progress for 1 s"),
    ],
)
async def test_a_passed_deadline_names_what_is_missing(redis, run_id, tmp_path, limits, announce, reason):
    async with controlled(redis, run_id, tmp_path, limits=limits) as (records, _):
        if announce:
            async with Heartbeat(redis, replica(run_id)):
                record = await until_state(records, run_id, RunState.FAILED)
        else:
            record = await until_state(records, run_id, RunState.FAILED)
    assert reason in record.reason


async def test_the_next_controller_resumes_an_unfinished_run(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, first):
        await until_state(records, run_id, RunState.STARTING)
        await until(lambda: "start /prepared" in first.requests)
    assert first.requests[-1] == "stop"
    second = HandCluster(run_id)
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, second, tmp_path).run(stopping))
    async with Heartbeat(redis, replica(run_id)):
        await until_state(records, run_id, RunState.RUNNING)
    stopping.set()
    await loop
    assert second.requests[0] == "start /prepared"
