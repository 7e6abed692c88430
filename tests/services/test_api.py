"""The REST gateway over a real server."""

import asyncio
import socket

import httpx
import pytest

from services.api.app import create_app
from services.api.server import serve_api
from services.contracts import EvaluationRecord, PassAt, ProcessInfo, RunState, StepRecord
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.presence import Presence
from services.streams.records import RunRecords
from tests.conftest import recipe_document


@pytest.fixture
async def api(redis):
    transport = httpx.ASGITransport(app=create_app(redis))
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        yield client


async def test_submitted_run_is_queued_and_shown(api, run_id):
    answer = await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert answer.status_code == 201
    shown = (await api.get(f"/v1/runs/{run_id}")).json()
    assert (shown["state"], shown["reason"], shown["rollout_replicas"]) == ("queued", "submitted", 1)
    assert shown["recipe"]["algorithm"]["clip_high"] == 0.28
    assert shown["groups"] == {
        "dispatched": 0, "trained": 0, "filtered": 0, "stale": 0, "dead": 0, "pending": 0, "reconciled": True,
    }  # fmt: skip
    assert run_id in [run["id"] for run in (await api.get("/v1/runs")).json()["runs"]]


async def test_id_is_made_from_the_name(api):
    answer = await api.post("/v1/runs", json={"recipe": recipe_document("/model")})
    assert answer.json()["id"].startswith("tiny-2")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"recipe": recipe_document("/m", learner={"ranks": 0})}, ["learner.ranks", "0", "greater than 0"]),
        ({"recipe": []}, ["recipe", "[]", "dictionary"]),
        ({"recipe": recipe_document("/m"), "id": "Not OK"}, ["id", "'Not OK'", "lower-case"]),
        ({"recipe": recipe_document("/m"), "idd": "x"}, ["idd", "not permitted"]),
        ({}, ["recipe", "required"]),
    ],
)
async def test_bad_submission_names_field_and_value(api, body, says):
    answer = await api.post("/v1/runs", json=body)
    assert answer.status_code == 422
    for part in says:
        assert part in answer.json()["detail"]


async def test_second_submission_under_an_id_is_refused(api, run_id):
    body = {"id": run_id, "recipe": recipe_document("/model")}
    await api.post("/v1/runs", json=body)
    assert "in use" in (await api.post("/v1/runs", json=body)).json()["detail"]


async def test_scale_and_cancel_change_what_is_desired(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert (await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 2})).json()["rollout_replicas"] == 2
    refused = await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 0})
    assert (refused.status_code, "rollout" in refused.json()["detail"]) == (422, True)
    assert (await api.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    assert (await RunRecords(redis).get(run_id)).cancel_requested
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "test")
    ended = await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 2})
    assert (ended.status_code, ended.json()["detail"]) == (409, f"run {run_id!r} has cancelled")


@pytest.mark.parametrize("run", ["missing", "UPPER", "a%7Db"])
async def test_unknown_run_is_404(api, run):
    for answer in (await api.get(f"/v1/runs/{run}"), await api.get(f"/v1/runs/{run}/metrics")):
        assert answer.status_code == 404


async def test_metrics_are_a_time_series_with_a_cursor(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    for step in (1, 2):
        record = StepRecord(
            step=step, version=step, optimizer_steps=2, groups=("g",), metrics={"accuracy": step / 4},
            generation_started_at=1.0, generation_finished_at=2.0, learning_started_at=2.0, learning_finished_at=3.0,
        )  # fmt: skip
        await redis.xadd(RunKeys(run_id).steps, {"m": record.model_dump_json()})
    first, second = (await api.get(f"/v1/runs/{run_id}/metrics")).json()["steps"]
    assert (first["metrics"]["accuracy"], second["metrics"]["accuracy"]) == (0.25, 0.5)
    behind = (await api.get(f"/v1/runs/{run_id}/metrics", params={"after": first["id"]})).json()["steps"]
    assert [step["step"] for step in behind] == [2]


async def test_a_run_shows_its_evaluations_whole(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    record = EvaluationRecord(
        name="step-5", set="aime", version=4, newest_version=6, prompts=29, samples_per_prompt=2, temperature=1.0,
        top_p=0.7, accuracy=0.25, standard_error=0.1, pass_at=(PassAt(k=2, value=0.5, standard_error=0.2),),
        majority=0.3, majority_standard_error=0.1, response_length=12.5, truncated_share=0.5, unknown=1, dropped=1,
    )  # fmt: skip
    await Journal(redis, RunKeys(run_id), "test").evaluation(record)
    [shown] = (await api.get(f"/v1/runs/{run_id}")).json()["evaluations"]
    assert shown == record.model_dump(mode="json")
    assert shown["pass_at"] == [{"k": 2, "value": 0.5, "standard_error": 0.2}]


async def test_probes_metrics_and_targets(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    assert (await api.get("/readyz")).json() == {"status": "ok"}
    assert "penstock_groups" in (await api.get("/metrics")).text
    info = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Presence(redis, info):
        targets = (await api.get("/v1/prometheus/targets")).json()
    expected = {"targets": ["h:9"], "labels": {"service": "rollout", "run": run_id, "process": "rollout-1"}}
    assert expected in targets
    assert targets[0]["labels"] == {"service": "api"}


async def test_every_route_is_documented(api):
    document = (await api.get("/openapi.json")).json()
    routes = {(path, method): one for path, ways in document["paths"].items() for method, one in ways.items()}
    assert len(routes) == 10
    assert all(one.get("description") for one in routes.values())


async def test_server_serves_until_stopped_and_refuses_a_taken_port(redis):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await serve_api(redis, "127.0.0.1", taken.getsockname()[1], asyncio.Event())
        port = taken.getsockname()[1]
    stopping = asyncio.Event()
    serving = asyncio.create_task(serve_api(redis, "127.0.0.1", port, stopping))
    async with httpx.AsyncClient() as client, asyncio.timeout(20):
        while True:
            try:
                assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        stopping.set()
        await serving


async def test_presence_lapses_with_its_process(redis, run_id):
    from services.streams.presence import live_processes

    info = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Presence(redis, info) as presence:
        await presence.update(state="ready", version=4)
        [found] = await live_processes(redis, run_id)
        assert (found.state, found.version) == ("ready", 4)
        await redis.delete(RunKeys(run_id).process("rollout-1"))  # what Redis does when heartbeats stop
        assert await live_processes(redis, run_id) == []
        assert await Journal(redis, RunKeys(run_id), "test").policy_version() is None


@pytest.mark.parametrize("after", ["abc", "1-2-3", "9" * 40])
async def test_bad_cursor_names_the_field(api, run_id, after):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    answer = await api.get(f"/v1/runs/{run_id}/metrics", params={"after": after})
    assert (answer.status_code, "after" in answer.json()["detail"]) == (422, True)


async def test_longest_accepted_name_can_be_submitted(api):
    document = recipe_document("/model")
    document["name"] = "x" * 63
    assert (await api.post("/v1/runs", json={"recipe": document})).status_code == 201
