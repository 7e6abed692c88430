"""The queue: the order of placement, positions, and what each run waits for."""

import time

import pytest

from services.contracts import ProcessInfo, RunState
from services.settings import parse_recipe
from services.streams.runs.queue import PLACEMENT, UNSEEN
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from services.waits import Waits
from tests.harness.small_run import recipe_document

RECIPE = parse_recipe(recipe_document("/model"))


async def test_queued_runs_are_placed_by_priority_then_by_age(own_api, own_server):
    _, redis = own_server
    records = RunRecords(redis)
    for run, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -5), ("e", 5)):
        await records.create(run, RECIPE, priority=priority)
    await records.create("running", RECIPE, priority=100)
    await records.transition("running", RunState.RUNNING, "test")
    waits = Waits(lambda: time.time() - 5.0)
    waits.pending(PLACEMENT, "needs 2 GPUs; the cluster has 1", 10.0, idle=True)
    info = ProcessInfo(id="controller-1", service="controller", run="b", host="h", pid=1, metrics="")
    async with Heartbeat(redis, info, waits):
        found = (await own_api.get("/v1/queue")).json()
        shown = (await own_api.get("/v1/runs/b")).json()
    assert [(run["id"], run["position"], run["priority"]) for run in found["runs"]] == [
        ("b", 1, 5),
        ("e", 2, 5),
        ("a", 3, 0),
        ("c", 4, 0),
        ("d", 5, -5),
    ]
    assert found["length"] == 5
    assert found["runs"][0]["waits_for"] == shown["waits_for"] == "needs 2 GPUs; the cluster has 1"
    assert found["runs"][1]["waits_for"] == UNSEEN
    assert shown["queue_position"] == 1
    assert (await own_api.patch("/v1/runs/d", json={"priority": 50})).json()["queue_position"] == 1
    assert (await own_api.get("/v1/runs/running")).json()["queue_position"] is None


async def test_a_submission_states_its_priority(api, run_id):
    body = {"id": run_id, "recipe": recipe_document("/model"), "priority": 7}
    answer = await api.post("/v1/runs", json=body)
    assert (answer.status_code, answer.json()["priority"]) == (201, 7)
    for value in (101, -101, 0.5, "high", None):
        refused = await api.post("/v1/runs", json=body | {"id": f"{run_id}-b", "priority": value})
        assert (refused.status_code, "priority" in refused.json()["detail"]) == (422, True)


@pytest.mark.parametrize("run", ["a", "²"])
async def test_an_unknown_run_has_no_place(api, run):
    assert (await api.get(f"/v1/runs/{run}-unknown")).status_code == 404
