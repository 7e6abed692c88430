"""The controller carries runs to their end; the test plays the cluster."""

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from services.contracts import EvaluationRecord, Lane, ProcessInfo, Prompt, RunState, Sampling, Task
from services.controller.attempts import Attempts, RunFailedError
from services.controller.recovery import Silence
from services.controller.service import Controller
from services.settings import parse_recipe
from services.streams.connection import RedisAwayError
from services.streams.effects import Effects, become_owner
from services.streams.journal import Journal, note
from services.streams.keys import RunKeys
from services.streams.library import FencedError
from services.streams.presence import Presence, live_processes
from services.streams.records import RunRecords
from services.waits import Waits
from tests.conftest import recipe_document


class HandCluster:
    """Does what the test says; remembers what it was asked. `failing` are the errors of the next requests of a name."""

    def __init__(self, only):
        self.only = only
        self.asked = []
        self.fault = []
        self.broken_learner = None
        self.ready = set()
        self.short = None
        self.failing = {}

    def ask(self, name, detail=""):
        self.asked.append(f"{name} {detail}".strip())
        if self.failing.get(name):
            raise self.failing[name].pop(0)

    async def prepare_model(self, record):
        self.asked.append("prepare")
        return "/prepared"

    async def start(self, record):
        self.ask("start", record.model_path)

    async def scale_rollout(self, run, replicas):
        self.ask("scale", replicas)

    async def faults(self, run, ready):
        if self.failing.get("faults"):
            raise self.failing["faults"].pop(0)
        self.ready = set(ready)
        return self.fault

    async def learner_fault(self, run):
        return self.broken_learner

    async def restart_learner(self, record):
        self.broken_learner = None  # half of a restart may hide what was wrong
        self.ask("restart learner")

    async def restart_sampler(self, run):
        self.ask("restart sampler")

    async def shortage(self, record):
        if self.failing.get("shortage"):
            raise self.failing["shortage"].pop(0)
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


async def commit(redis, run, step):
    """What a learner's step leaves behind, as far as the controller looks."""
    await redis.hset(RunKeys(run).policy, mapping={"version": step + 2, "step": step})


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
    await note(redis, RunKeys(run).evaluations, record, 0)


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


async def test_a_paused_run_goes_on_when_it_is_resumed_and_does_not_stall(redis, run_id, tmp_path):
    keys = RunKeys(run_id)
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 2.0}) as (records, _),
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await records.request_pause(run_id)
        await until_state(records, run_id, RunState.PAUSED)
        await asyncio.sleep(3.0)
        assert (await records.get(run_id)).state is RunState.PAUSED, "a pause is no stall"
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        await redis.set(keys.starved, "512 groups judged, 0 of 4 kept; 512 with 0")
        record = await until_state(records, run_id, RunState.PAUSED)
        assert record.reason == "512 groups judged, 0 of 4 kept; 512 with 0"
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        assert await redis.exists(keys.starved) == 0
        told = await events_of(redis, run_id, "paused")
    assert told[0] == f"paused on request; `penstock resume {run_id}` takes it on"


async def test_a_run_that_failed_is_resumed(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.fault = ["learner rank 0 died"]
        await until_state(records, run_id, RunState.FAILED)
        cluster.fault = []
        await records.resume(run_id)
        async with Presence(redis, replica(run_id)):
            record = await until_state(records, run_id, RunState.RUNNING)
    assert [change.state for change in record.history] == [
        "queued", "starting", "failed", "queued", "starting", "running",
    ]  # fmt: skip
    assert record.resumptions == 1
    assert [one for one in cluster.asked if one != "stop"] == ["prepare", "start /prepared", "start /prepared"]


async def test_a_former_controller_writes_nothing_more(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        await become_owner(redis, RunKeys(run_id), "controller")
        cluster.fault = ["seen by the former one alone"]
        await asyncio.sleep(1.0)
        # Its own controller takes the run up again, as the owner.
        record = await until_state(records, run_id, RunState.FAILED)
    assert [change.state for change in record.history] == ["queued", "starting", "failed"]


async def test_a_run_that_another_controller_keeps_is_left_to_it(redis, run_id, tmp_path):
    other = ProcessInfo(id="controller-2", service="controller", run=run_id, host="h", pid=2, metrics="", state="ready")
    keys = RunKeys(run_id)
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        async with Presence(redis, other):
            epoch = await become_owner(redis, keys, "controller")
            cluster.fault = ["seen by the former one alone"]
            await asyncio.sleep(3.0)
            assert await redis.get(keys.epoch("controller")) == str(epoch).encode(), "taken back"
            assert (await records.get(run_id)).state is RunState.STARTING
        await until_state(records, run_id, RunState.FAILED)


async def test_what_a_former_life_left_running_is_ended_before_the_next(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
        cluster.asked.clear()
        await records.resume(run_id)
        await until_state(records, run_id, RunState.STARTING)
    assert cluster.asked[:2] == ["stop", "start /prepared"]


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


async def until(condition, deadline_s=20.0):
    """Wait for a condition, or a coroutine's answer; fails at the deadline."""
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)


async def events_of(redis, run, phase):
    return [event.text for _, event in await Journal(redis, RunKeys(run), "test").events() if event.phase == phase]


@asynccontextmanager
async def present(redis, run, **processes):
    """Announcements of services that are ready, by id; yields them, to be silenced by leaving them."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                Presence(redis, ProcessInfo(id=name, service=service, run=run, host="h", pid=pid, metrics="h:1",
                                            state="ready"))
            )
            for pid, (name, service) in enumerate(processes.items(), 100)
        }  # fmt: skip


async def silence(presence):
    """What a stopped process does: its announcement lapses."""
    await presence.__aexit__()


async def test_learner_is_started_anew_and_progress_forgives(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.recovery.LEARNER_RESTARTS", 3)
    async with (
        controlled(redis, run_id, tmp_path) as (records, cluster),
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await until(lambda: cluster.ready >= {1})
        for step in (0, 0, 0, 7, 7, 7):
            if step:
                await commit(redis, run_id, step)
            cluster.broken_learner = f"learner rank 1: its process died at step {step}"
            await until(lambda: cluster.broken_learner is None)
        assert (await records.get(run_id)).state is RunState.RUNNING
        told = await events_of(redis, run_id, "learner-restarted")
        cluster.broken_learner = "learner rank 0: RuntimeError: no CUDA device"
        record = await until_state(records, run_id, RunState.FAILED)
    assert [re.search(r"\((.+)\)", line)[1] for line in told] == [
        *(f"{count} of 3 at rollout step 0" for count in (1, 2, 3)),
        *(f"{count} of 3 at rollout step 7" for count in (1, 2, 3)),
    ]  # fmt: skip
    assert told[0].startswith("learner rank 1: its process died at step 0; all ranks begin anew")
    assert record.reason == (
        "learner rank 0: RuntimeError: no CUDA device (the learner was started anew 3 times without a new rollout step)"
    )
    assert cluster.asked.count("restart learner") == 6
    assert cluster.asked[-1] == "stop"


async def test_silent_sampler_and_learner_are_started_anew(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.recovery.SILENT_S", 1.0)
    processes = {"sampler-a": "sampler", "learner-a": "learner", "learner-b": "learner"}
    async with (
        controlled(redis, run_id, tmp_path, learner={"ranks": 2}) as (records, cluster),
        Presence(redis, replica(run_id)),
        present(redis, run_id, **processes) as there,
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await asyncio.sleep(2.0)
        assert not [one for one in cluster.asked if one.startswith("restart")]
        await silence(there["learner-b"])
        await until(lambda: "restart learner" in cluster.asked, 4.0)
        await silence(there["sampler-a"])
        await until(lambda: "restart sampler" in cluster.asked, 4.0)
        await asyncio.sleep(2.0)
        asked = [one for one in cluster.asked if one.startswith("restart")]
        assert asked == ["restart learner", "restart sampler"], "what was started anew is given time to appear"
        [learner] = await events_of(redis, run_id, "learner-restarted")
        [sampler] = await events_of(redis, run_id, "sampler-restarted")
    assert re.match(r"learner: 1 of 2 processes silent for 1\d s; all ranks begin anew \(1 of 10", learner)
    assert re.fullmatch(r"sampler: 1 of 1 processes silent for 1\d s", sampler)


def test_time_in_which_nobody_could_be_heard_is_no_silence(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("services.controller.recovery.time.monotonic", lambda: clock[0])
    silence = Silence("sampler", 1)
    assert silence.observe(["a"], startup_s=60) is None
    clock[0] += 300  # Redis was away, and every announcement has lapsed
    assert silence.observe([], startup_s=60) is None
    clock[0] += 2
    assert silence.observe(["a"], startup_s=60) is None
    for _ in range(20):
        clock[0] += 1
        assert silence.observe([], startup_s=60) is None
    clock[0] += 1
    assert silence.observe([], startup_s=60) == "sampler: 1 of 1 processes silent for 31 s"
    silence.begin_anew(["a"])
    for _ in range(59):
        clock[0] += 1
        assert silence.observe(["a"], startup_s=60) is None, "that is the former process, whose presence has not lapsed"
    clock[0] += 2
    assert silence.observe([], startup_s=60) == "sampler: 1 of 1 processes silent for 61 s"


async def test_a_fault_comes_with_the_service_s_last_words(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        journal = Journal(redis, RunKeys(run_id), "verifier")
        await journal.event("service-failed", "verifier-1: RuntimeError: no sandbox")
        cluster.fault = ["verifier fleet: 6 replicas in a row died before they were ready"]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == (
        "verifier fleet: 6 replicas in a row died before they were ready; verifier-1: RuntimeError: no sandbox"
    )


async def test_a_run_outlives_a_redis_that_was_away_for_long(redis, run_id, tmp_path, monkeypatch):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        away = RedisAwayError("Redis at redis://h:1/0 has been away for 60 s: refused")
        monkeypatch.setattr(cluster, "faults", AsyncMock(side_effect=away))
        await until(lambda: cluster.faults.await_count >= 2)
        assert (await records.get(run_id)).state is RunState.STARTING, "its keeper is taken up again, it has not failed"
        monkeypatch.undo()
        async with Presence(redis, replica(run_id)):
            await until_state(records, run_id, RunState.RUNNING)
    assert cluster.asked[:3] == ["prepare", "start /prepared", "start /prepared"]


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


class GetTimeoutError(TimeoutError):
    """As Ray has one; the controller knows none of its errors."""


class ActorDiedError(Exception):
    """As Ray has one: no RuntimeError, and of many lines."""


@pytest.fixture
def hasty(monkeypatch):
    """Ten attempts of the cluster within half a second."""
    monkeypatch.setattr("services.controller.attempts.PAUSE_S", (0.01, 0.05))


async def phases(redis, run, *wanted):
    return [event.phase for _, event in await Journal(redis, RunKeys(run), "test").events() if event.phase in wanted]


@pytest.mark.usefixtures("hasty")
async def test_a_restart_that_the_cluster_could_not_do_stays_owed(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.recovery.SILENT_S", 1.0)
    processes = {"sampler-a": "sampler", "learner-a": "learner"}
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 2.5}) as (records, cluster),
        Presence(redis, replica(run_id)),
        present(redis, run_id, **processes) as there,
    ):
        await until_state(records, run_id, RunState.RUNNING)
        # Six tries half a second apart: a run that waits for its learner does not stall.
        cluster.failing["restart learner"] = [TimeoutError("killed 20 s ago and still there: r/learner-0")] * 6
        cluster.broken_learner = "learner rank 0: its process died"
        await until(lambda: cluster.asked.count("restart learner") == 7)
        cluster.failing["restart sampler"] = [ActorDiedError("The actor died\npid=1\n")] * 2
        await commit(redis, run_id, 1)
        await silence(there["sampler-a"])
        await until(lambda: cluster.asked.count("restart sampler") == 3, 6.0)
        await asyncio.sleep(0.7)
        asked = [one for one in cluster.asked if one.startswith("restart")]
        told = await events_of(redis, run_id, "restart-failed")
        began = await phases(redis, run_id, "learner-restarted", "sampler-restarted")
        assert (await records.get(run_id)).state is RunState.RUNNING
    assert asked == ["restart learner"] * 7 + ["restart sampler"] * 3, "and once done it is not done again"
    assert began == ["learner-restarted", "sampler-restarted"], "told once, however many attempts it takes"
    assert re.fullmatch(
        r"the learner could not be started anew: TimeoutError: killed 20 s ago and still there: r/learner-0; "
        r"tried again in 0\.01 s \(1 of 10 failed in a row\)",
        told[0],
    )
    assert told[6].startswith("the sampler could not be started anew: ActorDiedError: The actor died; tried")
    assert len(told) == 8


@pytest.mark.usefixtures("hasty")
async def test_a_restart_that_never_succeeds_fails_the_run_with_its_reason(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.attempts.ATTEMPTS", 3)
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.failing["restart learner"] = [RuntimeError("no room for 2 x 8 GPUs")] * 3
        cluster.broken_learner = "learner rank 0: its process died"
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == (
        "the learner could not be started anew: RuntimeError: no room for 2 x 8 GPUs (tried 3 times in a row)"
    )
    assert cluster.asked[-1] == "stop"


@pytest.mark.usefixtures("hasty")
async def test_scaling_that_timed_out_is_asked_for_again_whatever_is_wanted_by_then(redis, run_id, tmp_path):
    async with (
        controlled(redis, run_id, tmp_path) as (records, cluster),
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        cluster.failing["scale"] = [GetTimeoutError("Serve"), TimeoutError()]
        await records.scale(run_id, 3)
        await until(lambda: "scale 3" in cluster.asked)
        await records.scale(run_id, 1)  # what it was: but nobody knows whether the 3 came through
        await until(lambda: "scale 1" in cluster.asked)
        await asyncio.sleep(1.2)
        asked = [one for one in cluster.asked if one.startswith("scale")]
        assert (await records.get(run_id)).state is RunState.RUNNING
        told = await events_of(redis, run_id, "scaling-failed")
        assert await events_of(redis, run_id, "scaling") == ["rollout 1 -> 3 replicas", "rollout 3 -> 1 replicas"]
    assert set(asked) == {"scale 3", "scale 1"}
    assert len(asked) == 3, "two that failed, and one that did not"
    assert asked[-1] == "scale 1"
    assert told[0].startswith("the rollout fleet could not be scaled: GetTimeoutError: Serve; tried again in ")
    assert told[1].startswith("the rollout fleet could not be scaled: TimeoutError; tried again in ")


@pytest.mark.usefixtures("hasty")
async def test_a_run_that_runs_is_found_again_though_the_cluster_does_not_answer_at_once(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster), Presence(redis, replica(run_id)):
        await until_state(records, run_id, RunState.RUNNING)
        cluster.failing["start"] = [GetTimeoutError("Serve's controller")] * 3
        cluster.failing["shortage"] = [GetTimeoutError("Ray's control store")]
        await become_owner(redis, RunKeys(run_id), "controller")  # its keeper gives it up, and takes it up again
        await redis.hset(RunKeys(run_id).record, "pause_requested", "1")
        await until_state(records, run_id, RunState.PAUSED)
        cluster.failing["faults"] = [ActorDiedError("Ray's control store")] * 2
        await until(lambda: not cluster.failing["faults"])
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        [first, *_] = await events_of(redis, run_id, "restart-failed")
        assert len(await events_of(redis, run_id, "look-failed")) == 3
    assert first.startswith("the run's services could not be found again: GetTimeoutError: Serve's controller; ")
    assert cluster.asked.count("start /prepared") == 5


async def test_the_first_placing_may_fail_the_run(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        cluster.failing["start"] = [RuntimeError("the learner was not placed")]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == "the learner was not placed"


async def attempt(attempts, error):
    async with attempts:
        raise error


@pytest.mark.parametrize("error", [RedisAwayError("away"), FencedError("older"), RunFailedError("no")])
async def test_what_is_the_keeper_s_passes_through_an_attempt(redis, run_id, error):
    attempts = Attempts(Journal(redis, RunKeys(run_id), "test"), Waits(), "restart-failed", "it could not", "again")
    await attempt(attempts, KeyError("what the cluster raised"))
    assert attempts.owed
    assert not attempts.due
    attempts.settle()
    with pytest.raises(type(error)) as caught:
        await attempt(attempts, error)
    assert caught.value is error
    assert not attempts.owed
    assert attempts.due


async def test_attempts_pause_ever_longer_and_name_the_wait(redis, run_id, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("services.controller.attempts.time", SimpleNamespace(monotonic=lambda: clock[0]))
    waits = Waits()
    attempts = Attempts(Journal(redis, RunKeys(run_id), "test"), waits, "restart-failed", "it could not be", "again")
    pauses = []
    for _ in range(9):
        await attempt(attempts, OSError("disk"))
        began = clock[0]
        [wait] = waits.current(time.time() + 5)
        assert (wait.name, wait.waits_for) == ("again", "another attempt, for it could not be: OSError: disk")
        while not attempts.due:
            clock[0] += 1
        pauses.append(clock[0] - began)
    with pytest.raises(RunFailedError, match=r"^it could not be: OSError: disk \(tried 10 times in a row\)$"):
        await attempt(attempts, OSError("disk"))
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30]


async def waits_of(redis, run, name):
    found = [one.waits for one in await live_processes(redis, run) if one.service == "controller"]
    return [(wait.waits_for, wait.deadline_s) for waits in found for wait in waits if wait.name == name]


async def until_waits(redis, run, expected):
    ends = time.monotonic() + 10
    while (found := await waits_of(redis, run, "fleet")) != expected:
        assert time.monotonic() < ends, found
        await asyncio.sleep(0.1)


async def test_replicas_that_a_fleet_lacks_are_waited_for_by_name(redis, run_id, tmp_path):
    sections = {"limits": {"startup_timeout_s": 7.0}, "verifier": {"replicas": 2}}
    async with (
        controlled(redis, run_id, tmp_path, **sections) as (records, _),
        present(redis, run_id, **{"verifier-a": "verifier", "verifier-b": "verifier"}) as there,
        Presence(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await there["verifier-b"].update(state="starting")
        await until_waits(redis, run_id, [("replicas of verifier (1 of 2 ready)", 7.0)])
        await records.request_pause(run_id)
        await records.scale(run_id, 2)
        await until_waits(redis, run_id, [("replicas of rollout (1 of 2 ready) and verifier (1 of 2 ready)", 7.0)])
        await records.scale(run_id, 1)
        await there["verifier-b"].update(state="ready")
        await until_waits(redis, run_id, [])
        assert (await records.get(run_id)).state is RunState.PAUSED
