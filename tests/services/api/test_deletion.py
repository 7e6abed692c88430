"""The route that deletes a run: what it refuses, and what it asks of the controller."""

import pytest

from services.contracts import Closing, ProcessInfo, RunState
from services.storage.places import SHARED_FOLDERS
from services.streams.keys import RunKeys
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import delete_record
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
    assert (await RunRecords(redis).get(run_id)).delete_files
    assert {"id": run_id, "closing": "deleting"}.items() <= next(
        run.items() for run in (await api.get("/v1/runs")).json()["runs"] if run["id"] == run_id
    )
    refused = await api.post(f"{route}/resume")
    assert (refused.status_code, refused.json()) == (409, {"detail": f"run {run_id!r} is being deleted"})
    # As the controller does.
    assert await erase(redis, RunKeys(run_id), Closing.DELETING)
    assert await delete_record(redis, run_id)
    for answer in (await api.get(route), await api.delete(route)):
        assert (answer.status_code, answer.json()) == (404, {"detail": f"run {run_id!r} does not exist"})


@pytest.mark.parametrize("state", ["queued", "starting", "running", "paused"])
async def test_an_active_run_is_not_deleted(api, redis, run_id, state):
    route = await submitted(api, redis, run_id, *([] if state == "queued" else [RunState(state)]))
    info = ProcessInfo(id="rollout-7", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info):
        answer = await api.delete(route)
    assert answer.status_code == 409
    assert answer.json() == {"detail": f"run {run_id!r} is {state}; cancel it first"}
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
    answer = await api.delete(f"/v1/runs/{run}", params={"files": True})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("files: true is not valid: expected false")
