"""The controller restarts processes that die or fall silent, and retries failed requests a limited number of times."""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

from services.contracts import RunState
from services.controller.retry import RetriedRequest, RunFailedError
from services.streams.connection.client import RedisOutageError
from services.streams.connection.functions import FencedError
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.streams.state.ownership import become_owner
from services.waits import Waits
from tests.services.controller.hand_cluster import (
    commit,
    controlled,
    events_of,
    present,
    replica,
    silence,
    until,
    until_state,
)


async def test_progress_resets_the_count_of_learner_restarts(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.health.LEARNER_RESTARTS", 3)
    async with (
        controlled(redis, run_id, tmp_path) as (records, cluster),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await until(lambda: cluster.ready >= {("h", 1)})
        for step in (0, 0, 0, 7, 7, 7):
            if step:
                await commit(redis, run_id, step)
            cluster.broken_learner = f"learner rank 1: its process died at step {step}"
            await until(lambda: cluster.broken_learner is None)
        assert (await records.get(run_id)).state is RunState.RUNNING
        texts = await events_of(redis, run_id, "learner-restarted")
        cluster.broken_learner = "learner rank 0: RuntimeError: no CUDA device"
        record = await until_state(records, run_id, RunState.FAILED)
    assert [re.search(r"\((.+)\)", line)[1] for line in texts] == [
        *(f"{count} of 3 at rollout step 0" for count in (1, 2, 3)),
        *(f"{count} of 3 at rollout step 7" for count in (1, 2, 3)),
    ]
    assert texts[0].startswith("learner rank 1: its process died at step 0; all ranks are restarted")
    assert record.reason == (
        "learner rank 0: RuntimeError: no CUDA device (the learner was restarted 3 times without a new rollout step)"
    )
    assert cluster.requests.count("restart learner") == 6
    assert cluster.requests[-1] == "stop"


async def test_a_silent_sampler_and_learner_are_restarted(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.health.SILENT_S", 1.0)
    processes = {"sampler-a": "sampler", "learner-a": "learner", "learner-b": "learner"}
    async with (
        controlled(redis, run_id, tmp_path, learner={"ranks": 2}) as (records, cluster),
        Heartbeat(redis, replica(run_id)),
        present(redis, run_id, **processes) as there,
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await asyncio.sleep(2.0)
        assert not [request for request in cluster.requests if request.startswith("restart")]
        await silence(there["learner-b"])
        await until(lambda: "restart learner" in cluster.requests)
        await silence(there["sampler-a"])
        await until(lambda: "restart sampler" in cluster.requests)
        await asyncio.sleep(2.0)
        requests = [request for request in cluster.requests if request.startswith("restart")]
        assert requests == ["restart learner", "restart sampler"], "restarted processes are given time to appear"
        [learner] = await events_of(redis, run_id, "learner-restarted")
        [sampler] = await events_of(redis, run_id, "sampler-restarted")
    assert re.match(r"learner: 1 of 2 processes silent for 1\d s; all ranks are restarted \(1 of 10", learner)
    assert re.fullmatch(r"sampler: 1 of 1 processes silent for 1\d s", sampler)


class GetTimeoutError(TimeoutError):
    """Like Ray's; the controller does not import Ray's errors."""


class ActorDiedError(Exception):
    """Like Ray's: not a RuntimeError, and its text has many lines."""


@pytest.fixture
def hasty(monkeypatch):
    """Ten attempts of the cluster within half a second."""
    monkeypatch.setattr("services.controller.retry.PAUSE_S", (0.01, 0.05))


async def phases(redis, run, *wanted):
    return [event.phase for _, event in await EventLog(redis, RunKeys(run), "test").events() if event.phase in wanted]


@pytest.mark.usefixtures("hasty")
async def test_a_failed_restart_is_retried_until_it_succeeds(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.health.SILENT_S", 1.0)
    processes = {"sampler-a": "sampler", "learner-a": "learner"}
    async with (
        controlled(redis, run_id, tmp_path, limits={"stall_timeout_s": 2.5}) as (records, cluster),
        Heartbeat(redis, replica(run_id)),
        present(redis, run_id, **processes) as there,
    ):
        await until_state(records, run_id, RunState.RUNNING)
        # Six attempts half a second apart: a run that waits for its learner does not stall.
        cluster.failing["restart learner"] = [TimeoutError("killed 20 s ago and still there: r/learner-0")] * 6
        cluster.broken_learner = "learner rank 0: its process died"
        await until(lambda: cluster.requests.count("restart learner") == 7)
        cluster.failing["restart sampler"] = [ActorDiedError("The actor died\npid=1\n")] * 2
        await commit(redis, run_id, 1)
        await silence(there["sampler-a"])
        await until(lambda: cluster.requests.count("restart sampler") == 3)
        await asyncio.sleep(0.7)
        requests = [request for request in cluster.requests if request.startswith("restart")]
        texts = await events_of(redis, run_id, "restart-failed")
        began = await phases(redis, run_id, "learner-restarted", "sampler-restarted")
        assert (await records.get(run_id)).state is RunState.RUNNING
    assert requests == ["restart learner"] * 7 + ["restart sampler"] * 3, "a restart that succeeded is not repeated"
    assert began == ["learner-restarted", "sampler-restarted"], "reported once for all attempts"
    assert re.fullmatch(
        r"the learner could not be restarted: TimeoutError: killed 20 s ago and still there: r/learner-0; "
        r"retry in 0\.01 s \(1 of 10 failures in a row\)",
        texts[0],
    )
    assert texts[6].startswith("the sampler could not be restarted: ActorDiedError: The actor died; retry")
    assert len(texts) == 8


@pytest.mark.usefixtures("hasty")
async def test_a_restart_that_never_succeeds_fails_the_run(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("services.controller.retry.ATTEMPTS", 3)
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        cluster.failing["restart learner"] = [RuntimeError("no room for 2 x 8 GPUs")] * 3
        cluster.broken_learner = "learner rank 0: its process died"
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == (
        "the learner could not be restarted: RuntimeError: no room for 2 x 8 GPUs (failed 3 times in a row)"
    )
    assert cluster.requests[-1] == "stop"


@pytest.mark.usefixtures("hasty")
async def test_failed_scaling_is_retried_with_the_current_number(redis, run_id, tmp_path):
    async with (
        controlled(redis, run_id, tmp_path) as (records, cluster),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        cluster.failing["scale"] = [GetTimeoutError("Serve"), TimeoutError()]
        await records.scale(run_id, 3)
        await until(lambda: "scale 3" in cluster.requests)
        await records.scale(run_id, 1)  # the previous number, but 3 may have been applied
        await until(lambda: "scale 1" in cluster.requests)
        await asyncio.sleep(1.2)
        requests = [request for request in cluster.requests if request.startswith("scale")]
        assert (await records.get(run_id)).state is RunState.RUNNING
        texts = await events_of(redis, run_id, "scaling-failed")
        assert await events_of(redis, run_id, "scaling") == ["rollout 1 -> 3 replicas", "rollout 3 -> 1 replicas"]
    assert set(requests) == {"scale 3", "scale 1"}
    assert len(requests) == 3, "two failed requests and one that succeeded"
    assert requests[-1] == "scale 1"
    assert texts[0].startswith("the rollout fleet could not be scaled: GetTimeoutError: Serve; retry in ")
    assert texts[1].startswith("the rollout fleet could not be scaled: TimeoutError; retry in ")


@pytest.mark.usefixtures("hasty")
async def test_a_running_run_is_resumed_despite_cluster_time_outs(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster), Heartbeat(redis, replica(run_id)):
        await until_state(records, run_id, RunState.RUNNING)
        cluster.failing["start"] = [GetTimeoutError("Serve's controller")] * 3
        cluster.failing["shortage"] = [GetTimeoutError("Ray's control store")]
        await become_owner(redis, RunKeys(run_id), "controller")  # its controller is fenced and restarts
        await redis.hset(RunKeys(run_id).record, "pause_requested", "1")
        await until_state(records, run_id, RunState.PAUSED)
        cluster.failing["faults"] = [ActorDiedError("Ray's control store")] * 2
        await until(lambda: not cluster.failing["faults"])
        await records.resume(run_id)
        await until_state(records, run_id, RunState.RUNNING)
        [first, *_] = await events_of(redis, run_id, "restart-failed")
        assert len(await events_of(redis, run_id, "look-failed")) == 3
    assert first.startswith("the run's services could not be found: GetTimeoutError: Serve's controller; ")
    assert cluster.requests.count("start /prepared") == 5


async def test_a_failed_first_placement_fails_the_run(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        cluster.failing["start"] = [RuntimeError("the learner was not placed")]
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == "the learner was not placed"


def retried(redis, run, waits):
    event_log = EventLog(redis, RunKeys(run), "test")
    return RetriedRequest(event_log, waits, phase="restart-failed", failure="it could not be", wait="again")


async def attempt(attempts, error):
    async with attempts:
        raise error


@pytest.mark.parametrize("error", [RedisOutageError("unavailable"), FencedError("older"), RunFailedError("no")])
async def test_errors_of_redis_and_fencing_are_not_retried(redis, run_id, error):
    attempts = retried(redis, run_id, Waits())
    await attempt(attempts, KeyError("what the cluster raised"))
    assert attempts.retry_pending
    assert not attempts.due
    attempts.reset()
    with pytest.raises(type(error)) as caught:
        await attempt(attempts, error)
    assert caught.value is error
    assert not attempts.retry_pending
    assert attempts.due


async def test_pauses_between_retries_grow_and_name_the_wait(redis, run_id, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("services.controller.retry.time", SimpleNamespace(monotonic=lambda: clock[0]))
    waits = Waits()
    attempts = retried(redis, run_id, waits)
    pauses = []
    for _ in range(9):
        await attempt(attempts, OSError("disk"))
        began = clock[0]
        [wait] = waits.current(time.time() + 5)
        assert (wait.name, wait.waits_for) == ("again", "a retry; it could not be: OSError: disk")
        while not attempts.due:
            clock[0] += 1
        pauses.append(clock[0] - began)
    with pytest.raises(RunFailedError, match=r"^it could not be: OSError: disk \(failed 10 times in a row\)$"):
        await attempt(attempts, OSError("disk"))
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30]


async def waits_of(redis, run, name):
    controllers = [process for process in await live_processes(redis, run) if process.service == "controller"]
    return [(wait.waits_for, wait.deadline_s) for process in controllers for wait in process.waits if wait.name == name]


async def until_waits(redis, run, expected):
    ends = time.monotonic() + 20
    while (waits := await waits_of(redis, run, "fleet")) != expected:
        assert time.monotonic() < ends, waits
        await asyncio.sleep(0.1)


async def test_missing_replicas_are_named_in_a_wait(redis, run_id, tmp_path):
    sections = {"limits": {"startup_timeout_s": 7.0}, "verifier": {"replicas": 2}}
    async with (
        controlled(redis, run_id, tmp_path, **sections) as (records, _),
        present(redis, run_id, **{"verifier-a": "verifier", "verifier-b": "verifier"}) as there,
        Heartbeat(redis, replica(run_id)),
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
