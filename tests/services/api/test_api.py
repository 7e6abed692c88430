"""The REST gateway over a real server."""

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack

import httpx
import pytest

from services.api.app import create_app
from services.api.server import serve_api
from services.contracts import (
    EvaluationRecord,
    PassAt,
    ProcessInfo,
    RunState,
    StepRecord,
)
from services.settings import Recipe
from services.streams.connection.client import client
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions
from services.streams.state.heartbeat import LAPSES_S, Heartbeat, live_processes
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import RunRecords
from services.waits import Waits
from tests.deploy.command_line import penstock
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted
from tests.services.driven import set_back


async def test_submitted_run_is_queued_and_shown(api, run_id):
    answer = await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert answer.status_code == 201
    shown = (await api.get(f"/v1/runs/{run_id}")).json()
    assert (shown["state"], shown["reason"], shown["rollout_replicas"]) == ("queued", "submitted", 1)
    assert shown["recipe"]["algorithm"]["clip_high"] == 0.28
    counters = dict.fromkeys(("dispatched", "trained", "filtered", "stale", "dead", "pending"), 0)
    assert shown["groups"] == counters | {"reconciled": True}
    assert run_id in [run["id"] for run in (await api.get("/v1/runs")).json()["runs"]]


async def test_an_id_is_generated_from_the_name(api):
    answer = await api.post("/v1/runs", json={"recipe": recipe_document("/model")})
    assert answer.json()["id"].startswith("tiny-2")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"recipe": recipe_document("/m", learner={"ranks": 0})},
            ["learner.ranks: 0 is not valid: expected a number", "than 0"],
        ),
        ({"recipe": []}, ["recipe: [] is not valid: expected a mapping"]),
        ({"recipe": recipe_document("/m"), "id": "Not OK"}, ["id: 'Not OK' is not valid: expected lower-case letters"]),
        ({"recipe": recipe_document("/m"), "idd": "x"}, ["idd: 'x' is not valid: expected a known field"]),
        ({}, ["recipe: missing: this field is required"]),
    ],
)
async def test_bad_submission_names_field_and_value(api, body, expected):
    answer = await api.post("/v1/runs", json=body)
    assert answer.status_code == 422
    for part in expected:
        assert part in answer.json()["detail"]


async def test_a_second_submission_under_an_id_is_rejected(api, run_id):
    body = {"id": run_id, "recipe": recipe_document("/model")}
    await api.post("/v1/runs", json=body)
    assert (
        f"id: {run_id!r} is not valid: expected an id that is not in use"
        in (await api.post("/v1/runs", json=body)).json()["detail"]
    )


async def test_scale_and_cancel_change_the_desired_state(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert (await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 2})).json()["rollout_replicas"] == 2
    rejected = await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 0})
    assert (rejected.status_code, "rollout" in rejected.json()["detail"]) == (422, True)
    assert (await api.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    assert (await RunRecords(redis).get(run_id)).cancel_requested
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "test")
    ended = await api.patch(f"/v1/runs/{run_id}/scale", json={"rollout": 2})
    assert (ended.status_code, ended.json()["detail"]) == (409, f"run {run_id!r} has ended: it is cancelled")


@pytest.mark.parametrize("run", ["missing", "UPPER", "a%7Db"])
async def test_unknown_run_is_404(api, run):
    for route in ("", "/metrics", "/waits", "/dead"):
        assert (await api.get(f"/v1/runs/{run}{route}")).status_code == 404
    for route in ("/cancel", "/pause", "/resume"):
        assert (await api.post(f"/v1/runs/{run}{route}")).status_code == 404


async def test_metrics_are_a_time_series_with_a_cursor(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    for step in (1, 2):
        record = StepRecord(
            step=step,
            version=step,
            optimizer_steps=2,
            groups=("g",),
            metrics={"accuracy": step / 4},
            generation_started_at=1.0,
            generation_finished_at=2.0,
            learning_started_at=2.0,
            learning_finished_at=3.0,
        )
        await redis.xadd(RunKeys(run_id).steps, {"m": record.model_dump_json()})
    first, second = (await api.get(f"/v1/runs/{run_id}/metrics")).json()["steps"]
    assert (first["metrics"]["accuracy"], second["metrics"]["accuracy"]) == (0.25, 0.5)
    behind = (await api.get(f"/v1/runs/{run_id}/metrics", params={"after": first["id"]})).json()["steps"]
    assert [step["step"] for step in behind] == [2]


async def test_a_run_shows_all_fields_of_its_evaluations(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    record = EvaluationRecord(
        name="step-5",
        set="aime",
        version=4,
        newest_version=6,
        prompts=29,
        samples_per_prompt=2,
        temperature=1.0,
        top_p=0.7,
        accuracy=0.25,
        standard_error=0.1,
        pass_at=(PassAt(k=2, value=0.5, standard_error=0.2),),
        majority=0.3,
        majority_standard_error=0.1,
        response_length=12.5,
        truncated_share=0.5,
        unknown=1,
        dropped=1,
    )
    transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "sampler")
    await transitions.record_evaluation(record)
    [shown] = (await api.get(f"/v1/runs/{run_id}")).json()["evaluations"]
    assert shown == record.model_dump(mode="json")
    assert shown["pass_at"] == [{"k": 2, "value": 0.5, "standard_error": 0.2}]


async def test_probes_metrics_and_targets(api, redis, run_id):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    assert (await api.get("/readyz")).json() == {"status": "ok"}
    assert "penstock_groups" in (await api.get("/metrics")).text
    info = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info):
        targets = (await api.get("/v1/prometheus/targets")).json()
    expected = {"targets": ["h:9"], "labels": {"service": "rollout", "run": run_id, "process": "rollout-1"}}
    assert expected in targets
    assert targets[0]["labels"] == {"service": "api"}


async def test_every_route_is_documented(api):
    document = (await api.get("/openapi.json")).json()
    routes = [route for methods in document["paths"].values() for route in methods.values()]
    assert len(routes) > 30
    assert all(route.get("description") for route in routes)


async def test_the_server_stops_on_request_and_needs_a_free_port(redis):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await serve_api(redis, ACCESS, "127.0.0.1", taken.getsockname()[1], asyncio.Event())
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, ACCESS, "127.0.0.1", port, stopping))
    async with httpx.AsyncClient(headers=HEADERS) as client, asyncio.timeout(60):
        while True:
            try:
                assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
        stopping.set()
        await serving


async def test_a_process_disappears_with_its_heartbeat(redis, run_id):
    info = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info) as heartbeat:
        await heartbeat.update(state="ready", version=4)
        [process] = await live_processes(redis, run_id)
        assert (process.state, process.version) == ("ready", 4)
        await set_back(redis, RunKeys(run_id), "rollout-1", LAPSES_S + 1)
        assert await live_processes(redis, run_id) == []
        assert await read_policy(redis, RunKeys(run_id)) is None


@pytest.mark.parametrize("after", ["abc", "1-2-3", "9" * 40])
async def test_bad_cursor_names_the_field(api, run_id, after):
    await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
    answer = await api.get(f"/v1/runs/{run_id}/metrics", params={"after": after})
    assert (answer.status_code, "after" in answer.json()["detail"]) == (422, True)


async def test_pause_and_resume_of_a_running_run(api, redis, run_id):
    path = await submitted(api, redis, run_id)
    rejected = await api.post(f"{path}/pause")
    expected = (409, f"run {run_id!r} is queued; only a running one can be paused")
    assert (rejected.status_code, rejected.json()["detail"]) == expected
    await RunRecords(redis).transition(run_id, RunState.RUNNING, "test")
    paused = await api.post(f"{path}/pause")
    assert (paused.status_code, paused.json()["pause_requested"]) == (202, True)
    await RunRecords(redis).transition(run_id, RunState.PAUSED, "starved")
    await redis.set(RunKeys(run_id).starved, "64 groups judged, none kept: 0:60 4:4")
    assert (await api.get(path)).json()["alerts"] == ["64 groups judged, none kept: 0:60 4:4"]
    rewound = await api.post(f"{path}/resume", json={"from_step": 0})
    assert (rewound.status_code, "cancel it first" in rewound.json()["detail"]) == (409, True)
    resumed = await api.post(f"{path}/resume", json={"from_step": None})
    assert resumed.status_code == 202
    assert (resumed.json()["pause_requested"], resumed.json()["alerts"]) == (False, [])


async def test_an_ended_run_is_resumed_from_a_checkpoint(api, redis, run_id):
    path = await submitted(api, redis, run_id, RunState.RUNNING)
    assert (await api.post(f"{path}/resume")).status_code == 409
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    await redis.set(RunKeys(run_id).checkpoints, "[2, 4]")
    for step, value in ((3, "from_step: 3 is not valid"), (-1, "-1"), (2**31, str(2**31)), ("two", "'two'")):
        rejected = await api.post(f"{path}/resume", json={"from_step": step})
        assert rejected.status_code == 422
        assert "from_step" in rejected.json()["detail"]
        assert value in rejected.json()["detail"]
    assert (await api.post(f"{path}/resume", json={"from": 2})).status_code == 422
    view = (await api.post(f"{path}/resume", json={"from_step": 2})).json()
    assert (view["state"], view["reason"]) == ("queued", "resumed from step 2")
    assert (view["resumptions"], view["resume_step"]) == (1, 2)
    await RunRecords(redis).transition(run_id, RunState.CANCELLED, "test")
    view = (await api.post(f"{path}/resume")).json()
    assert (view["state"], view["reason"], view["resumptions"]) == ("queued", "resumed", 2)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0.5, "learner.gpus: 0.5 is not valid: expected 0 (on CPU) or 1 with learner.ranks = 2, which share no device"),
        (1, None),
    ],
)
async def test_ranks_that_share_a_device_are_refused(api, redis, run_id, gpus, expected):
    document = recipe_document("/model", learner={"gpus": gpus})
    await api.post("/v1/runs", json={"id": run_id, "recipe": document})
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    answer = await api.post(f"/v1/runs/{run_id}/resume", json={"learner_ranks": 2})
    assert answer.json().get("detail") == expected
    assert (await RunRecords(redis).get(run_id)).recipe.learner.ranks == (1 if expected else 2)


async def test_what_an_earlier_release_accepted_of_devices_is_resumed(api, redis, run_id):
    """With other ranks too: the text of the fault names their number, but it is not a new one."""
    await submitted(api, redis, run_id, RunState.FAILED)
    stored = recipe_document("/model", learner={"gpus": 2.0})
    await redis.hset(RunKeys(run_id).record, "recipe", Recipe.model_validate(stored).model_dump_json())
    assert (await api.post(f"/v1/runs/{run_id}/resume", json={"learner_ranks": 4})).status_code == 202


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"path": "hf://nonsense"}}, "model.path: 'hf://nonsense' is not valid: expected ORG/NAME@REVISION"),
        ({"model": {"path": "hf://datasets/a/b@main"}}, "model.path: 'hf://datasets/a/b@main' is not valid: expected "),
        (
            {"data": {"source": "parquet", "path": "hf://a/b@main"}},
            "data.path: 'hf://a/b@main' is not valid: expected ORG/NAME@REVISION/PATH or hf://datasets/",
        ),
        (
            {"data": {"source": "jsonl", "path": "a/b@main"}},
            "data.path: 'a/b@main' is not valid: expected ORG/NAME@REVISION/PATH of one file with source = 'jsonl'",
        ),
        (
            {"evaluation": {"sets": [{"name": "aime", "source": "csv", "path": "a/b@main"}]}},
            "evaluation.sets 'aime'.path: 'a/b@main' is not valid: expected ORG/NAME@REVISION/PATH of one file",
        ),
        (
            {"model": {"path": "/m", "chat_template": "hf://a/b@main/x.jinja"}},
            "model.chat_template: 'hf://a/b@main/x.jinja' is not valid: expected a local path or s3://",
        ),
        ({"model": {"path": "a/b@main"}, "data": {"source": "parquet", "path": "a/b@main"}}, None),
    ],
)
async def test_addresses_of_the_hub_are_checked_at_submission(api, tmp_path, run_id, sections, expected):
    document = recipe_document("/model") | sections
    answer = await api.post("/v1/runs", json={"id": run_id, "recipe": document})
    assert (answer.status_code == 201) == (expected is None), answer.text
    assert expected is None or answer.json()["detail"].startswith(expected)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(document))
    status, output = penstock("validate", str(recipe))
    assert (status == 0) == (expected is None), output
    assert expected is None or expected in output


async def test_a_run_sampled_with_top_p_is_shown_not_resumed(api, redis, run_id):
    """An earlier release accepted it."""
    await submitted(api, redis, run_id, RunState.FAILED)
    stored = recipe_document("/model", rollout={"top_p": 0.9})
    await redis.hset(RunKeys(run_id).record, "recipe", Recipe.model_validate(stored).model_dump_json())
    assert (await api.get(f"/v1/runs/{run_id}")).json()["recipe"]["rollout"]["top_p"] == 0.9
    refused = await api.post(f"/v1/runs/{run_id}/resume")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("rollout.top_p: 0.9 is not valid: expected 1.0 with")


async def test_steps_and_versions_are_separate_fields(api, redis, run_id):
    path = await submitted(api, redis, run_id)
    shown = (await api.get(path)).json()
    assert (shown["policy_version"], shown["rollout_steps"]) == (None, 0)
    await redis.hset(RunKeys(run_id).policy, mapping={"version": 7, "step": 2, "weights": "ab", "announced": 7})
    shown = (await api.get(path)).json()
    assert (shown["policy_version"], shown["rollout_steps"]) == (7, 2)


async def test_waits_are_sorted_and_stalls_are_alerts(api, redis, run_id):
    path = await submitted(api, redis, run_id)
    now = time.time()
    announced = {"rollout-1": ("tasks", 90, 600, True), "learner-1": ("sync", 120, 60, False)}
    assert (await api.get(f"{path}/waits")).json() == []
    async with AsyncExitStack() as alive:
        for name, (wait, seconds, deadline_s, idle) in announced.items():
            waits = Waits(lambda seconds=seconds: now - seconds)
            waits.pending(wait, f"input of {name}", deadline_s, idle)
            service = name.split("-")[0]
            info = ProcessInfo(id=name, service=service, run=run_id, host="h", pid=1, metrics="h:9")
            await alive.enter_async_context(Heartbeat(redis, info, waits))
        first, second = (await api.get(f"{path}/waits")).json()
        [alert] = (await api.get(path)).json()["alerts"]
    assert first.pop("seconds") == pytest.approx(120, abs=20)
    assert first == {
        "process": "learner-1",
        "service": "learner",
        "name": "sync",
        "waits_for": "input of learner-1",
        "since": now - 120,
        "deadline_s": 60.0,
        "idle": False,
        "stalled": True,
    }
    assert (second["process"], second["idle"], second["stalled"]) == ("rollout-1", True, False)
    assert alert.startswith("learner-1: waits for input of learner-1 (sync) for 1")
    assert alert.endswith(" s of at most 60 s")


async def test_a_full_redis_is_503_only_for_a_new_run(own_server, run_id):
    _, redis = own_server
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as api:
        path = await submitted(api, redis, run_id, RunState.RUNNING)
        # Other data fill a Redis that is as large as the plans.
        await redis.setrange("other", 2**27, "x")
        await redis.config_set("maxmemory", 2**27)
        rejected = await api.post("/v1/runs", json={"recipe": recipe_document("/model")})
        assert (rejected.status_code, "maxmemory" in rejected.json()["detail"]) == (503, True)
        assert (await api.post(f"{path}/pause")).status_code == 202
        assert (await api.post(f"{path}/cancel")).status_code == 202
        assert (await api.get(path)).json()["pause_requested"]


async def test_an_unavailable_redis_is_503(own_server, run_id):
    server, _ = own_server
    redis = client(f"redis://127.0.0.1:{server.port}/0", patience_s=0.5)
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as api:
        path = await submitted(api, redis, run_id)
        server.stop()
        for answer in (await api.get(path), await api.post(f"{path}/cancel")):
            assert (answer.status_code, "has been unavailable for 0.5 s" in answer.json()["detail"]) == (503, True)
        assert (await api.get("/healthz")).status_code == 200
    await redis.aclose()


async def test_the_longest_valid_name_can_be_submitted(api):
    document = recipe_document("/model")
    document["name"] = "x" * 63
    assert (await api.post("/v1/runs", json={"recipe": document})).status_code == 201
