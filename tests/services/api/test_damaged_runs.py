"""A run that this release cannot read is shown with what it can read of it, and never answered with a 5xx."""

import json

import httpx
import pytest

from services.api.access.roles import Principal, Role
from services.api.access.tokens import TokenAccess, token_digest
from services.api.app import create_app
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted

HOSTILE = (
    b"",
    b"waltzing",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b"5",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a": NaN}',
    b'[{"state": "flying", "at": 1, "reason": "x"}]',
    b'[{"state": "failed", "at": 1e999, "reason": "x"}]',
    "²".encode(),
    None,
)
FIELDS = (
    "recipe",
    "state",
    "rollout_replicas",
    "history",
    "created_at",
    "project",
    "cancel_requested",
    "pause_requested",
    "summary",
    "resumptions",
    "resume_step",
    "closing",
    "closed_at",
    "delete_files",
    "place",
    "inputs",
    "files",
    "model_path",
    "export_path",
    "revision",
    "priority",
    "edits",
)
ACTIONS = (
    ("GET", "", None),
    ("GET", "/metrics", None),
    ("GET", "/waits", None),
    ("GET", "/dead", None),
    ("GET", "/unknown", None),
    ("GET", "/events", None),
    ("GET", "/logs", None),
    ("GET", "/samples", None),
    ("GET", "/export", None),
    ("PATCH", "", {"priority": 1}),
    ("POST", "/clone", {}),
    ("POST", "/archive", None),
    ("POST", "/pause", None),
    ("POST", "/resume", None),
    ("POST", "/resume", {"from_step": 0, "learner_ranks": 2, "rollout": 2}),
    ("PATCH", "/scale", {"rollout": 2}),
    ("POST", "/cancel", None),
    ("DELETE", "", None),
)


@pytest.mark.parametrize(
    ("state", "each"),
    [
        (RunState.FAILED, len(HOSTILE)),
        pytest.param(RunState.FAILED, 5, marks=pytest.mark.slow),
        pytest.param(RunState.RUNNING, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("field", FIELDS)
async def test_a_record_damaged_in_any_field_is_shown(api, redis, run_id, field, state, each):
    """With each value, or with every `each`-th: over all fields, every value comes up."""
    await submitted(api, redis, run_id)
    for number, value in list(enumerate(HOSTILE))[FIELDS.index(field) % each :: each]:
        run = f"{run_id}-{number}"
        route = await submitted(api, redis, run, state)
        if value is None:
            await redis.hdel(RunKeys(run).record, field)
        else:
            await redis.hset(RunKeys(run).record, field, value)
        for method, path, body in ACTIONS:
            answer = await api.request(method, route + path, json=body)
            assert answer.status_code < 500, (value, method, path, answer.text)
            json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
            if (method, path) == ("GET", ""):
                assert answer.status_code == 200, (value, answer.text)
                problem = answer.json()["problem"]
                assert problem is None or len(problem) < 1000
        for path in (f"/v1/runs?name={run}", f"/v1/compare?runs={run},{run_id}", "/v1/projects", "/v1/queue"):
            page = await api.get(path)
            assert page.status_code == 200, (value, path, page.text)
        await redis.unlink(RunKeys(run).record)


async def test_the_field_and_the_reason_are_named(api, redis, run_id):
    route = await submitted(api, redis, run_id)
    await redis.hset(RunKeys(run_id).record, mapping={"state": "waltzing", "rollout_replicas": "x" * 500})
    answer = (await api.get(route)).json()
    assert (answer["state"], answer["rollout_replicas"], answer["project"]) == ("unreadable", 0, "default")
    assert answer["problem"].startswith(
        f"run {run_id!r}: its record is damaged: state: 'waltzing' is not valid: 'waltzing' is not a valid RunState; "
        "rollout_replicas: 'xxx"
    )
    assert len(answer["problem"]) < 700
    [shown] = (await api.get("/v1/runs", params={"name": run_id})).json()["runs"]
    assert (shown["state"], shown["problem"]) == ("unreadable", answer["problem"])
    assert answer["recipe"]["name"] == recipe_document("/model")["name"]
    refused = await api.post(f"{route}/resume")
    assert (refused.status_code, refused.json()["detail"]) == (409, answer["problem"])
    await redis.unlink(RunKeys(run_id).record)


async def test_a_run_of_an_unreadable_project_is_of_none(redis, run_id):
    """Not of the default one, whose principals could then read it."""
    access = TokenAccess({token_digest("of-default"): Principal("of-default", {"default": Role.ADMIN})})
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")), project="team-a")
    await redis.hset(RunKeys(run_id).record, "project", "team a")
    transport = httpx.ASGITransport(app=create_app(redis, access))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        shown = await client.get(f"/v1/runs/{run_id}", headers={"authorization": "Bearer of-default"})
    assert shown.status_code == 404
    await redis.unlink(RunKeys(run_id).record)
