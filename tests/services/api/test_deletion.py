"""The route that deletes a run: what it refuses, and what it asks of the controller."""

import pytest

from services.contracts import Closing, Event, ProcessInfo, RunState
from services.settings import parse_recipe
from services.storage.places import SHARED_FOLDERS
from services.streams.keys import ACTIVE_RUNS, RUNS, RunKeys
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import delete_record
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted


async def test_a_deletion_is_accepted_and_ends_with_an_unknown_run(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.RUNNING, RunState.FAILED)
    assert (await api.get(route)).json()["closing"] is None
    for files in (False, True, False):
        answer = await api.delete(route, params={"files": files})
        assert (answer.status_code, answer.json()["closing"], answer.json()["state"]) == (202, "deleting", "failed")
        assert (await RunRecords(redis).get(run_id)).delete_files is files, "the last request counts"
    assert {"id": run_id, "closing": "deleting"}.items() <= next(
        run.items() for run in (await api.get("/v1/runs")).json()["runs"] if run["id"] == run_id
    )
    refused = await api.post(f"{route}/resume")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"run {run_id!r} is being deleted")
    # As the controller does.
    assert await erase(redis, RunKeys(run_id), Closing.DELETING)
    assert await delete_record(redis, run_id, files=False)
    for answer in (await api.get(route), await api.delete(route)):
        assert (answer.status_code, answer.json()["detail"]) == (404, f"run {run_id!r} does not exist")


@pytest.mark.parametrize("state", ["queued", "starting", "running", "paused"])
async def test_an_active_run_is_not_deleted(api, redis, run_id, state):
    route = await submitted(api, redis, run_id, *([] if state == "queued" else [RunState(state)]))
    info = ProcessInfo(id="rollout-7", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info):
        answer = await api.delete(route)
    assert answer.status_code == 409
    assert answer.json()["detail"] == f"run {run_id!r} is {state}; cancel it first"
    assert (await RunRecords(redis).get(run_id)).closing is None


async def test_a_run_with_live_processes_is_not_deleted(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.CANCELLED)
    info = ProcessInfo(id="rollout-7", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info):
        answer = await api.delete(route)
    assert answer.status_code == 409
    assert "still has live processes (rollout-7); retry when they have ended" in answer.json()["detail"]
    assert (await api.delete(route)).status_code == 202


@pytest.mark.parametrize("run", sorted(SHARED_FOLDERS))
async def test_a_folder_of_all_runs_is_no_run_s_own(api, redis, run):
    answer = await api.post("/v1/runs", json={"id": run, "recipe": recipe_document("/model")})
    assert answer.status_code == 422
    assert (
        answer.json()["detail"] == f"id: {run!r} is not valid: expected another name; every run uses the folder {run}"
    )
    earlier = await RunRecords(redis).create(run, parse_recipe(recipe_document("/model")))  # by an earlier release
    answer = await api.delete(f"/v1/runs/{earlier.id}", params={"files": True})
    await redis.delete(RunKeys(run).record)
    await redis.zrem(RUNS, run)
    await redis.srem(ACTIVE_RUNS, run)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("files: true is not valid: expected false")


async def test_a_new_run_has_nothing_of_an_earlier_one(api, redis, run_id):
    """A process of an earlier release writes of a run that was deleted."""
    keys = RunKeys(run_id)
    await redis.xadd(keys.events, {"m": Event(service="verifier", phase="x", text="late", at=1.0).model_dump_json()})
    await redis.set(keys.epoch("sampler"), "7")
    route = await submitted(api, redis, run_id)
    assert (await api.get(route)).json()["events"] == []
    assert not await redis.exists(keys.epoch("sampler"))
    await EventLog(redis, keys, "sampler").write("starvation", "its own")
    answer = await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert (answer.status_code, "not in use" in answer.json()["detail"]) == (409, True)
    assert len((await api.get(route)).json()["events"]) == 1, "a refused submission deletes nothing"


async def test_a_run_of_another_release_can_be_deleted(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    await redis.hset(RunKeys(run_id).record, "recipe", '{"name": "old"}')
    problem = (
        f"run {run_id!r} was submitted by another release, and this one cannot read it: recipe.model: missing: "
        "this field is required; it can only be cancelled and, once it has ended, deleted"
    )
    answer = await api.get(route)
    assert (answer.status_code, answer.json()["problem"]) == (200, problem)
    assert answer.json()["recipe"] == {"name": "old"}
    assert run_id in [run["id"] for run in (await api.get("/v1/runs")).json()["runs"]]
    assert (await api.delete(route)).json()["detail"] == f"run {run_id!r} is running; cancel it first"
    assert (await api.post(f"{route}/cancel")).status_code == 202
    assert (await RunRecords(redis).get(run_id)).cancel_requested
    other = await api.post("/v1/runs", json={"id": f"{run_id}-b", "recipe": recipe_document("/model")})
    assert other.status_code == 201, "it does not affect other runs"
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "test")
    answer = await api.post(f"{route}/resume")
    assert (answer.status_code, answer.json()["detail"]) == (409, problem)
    answer = await api.delete(route)
    assert (answer.status_code, answer.json()["closing"]) == (202, "deleting")
