"""The list of runs by the gateway: pages, filters, projects, and entity tags of one run."""

import asyncio

import httpx
import pytest

from services.api.access.roles import Principal, Role
from services.api.access.tokens import TokenAccess, token_digest
from services.api.app import create_app
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted

RECIPE = parse_recipe(recipe_document("/model"))


async def ids(api, **wanted):
    """Of all pages."""
    found, after = [], None
    while True:
        answer = await api.get("/v1/runs", params=wanted | ({"after": after} if after else {}))
        assert answer.status_code == 200, answer.text
        found += [run["id"] for run in answer.json()["runs"]]
        if (after := answer.json()["next"]) is None:
            return found


async def test_pages_of_runs_newest_first(api, redis, run_id):
    names = [f"{run_id}-{number}" for number in range(5)]
    for name in names:
        await RunRecords(redis).create(name, RECIPE)
    await RunRecords(redis).transition(names[1], RunState.FAILED, "test")
    for limit in (1, 2, 500):
        assert await ids(api, name=run_id, limit=limit) == names[::-1]
        assert await ids(api, name=run_id, limit=limit, state="failed") == [names[1]]
    assert await ids(api, name=run_id, state=["failed", "running"]) == [names[1]]
    assert await ids(api, name=run_id, archived=True) == []
    assert await ids(api, name=run_id, project="another") == []


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 501}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"after": "x"}, "after"),
        ({"after": "\uff11:a"}, "after"),
        ({"state": "waltzing"}, "state"),
        ({"archived": "perhaps"}, "archived"),
        ({"name": "x" * 97}, "name"),
    ],
)
async def test_a_filter_that_is_not_valid_is_named(api, wanted, field):
    answer = await api.get("/v1/runs", params=wanted)
    assert (answer.status_code, field in answer.json()["detail"]) == (422, True)


async def test_only_visible_projects_are_listed(redis, run_id):
    for project in ("seen", "hidden"):
        await RunRecords(redis).create(f"{run_id}-{project}", RECIPE, project=project)
    access = TokenAccess({token_digest("t"): Principal("someone", {"seen": Role.VIEWER, "other": Role.VIEWER})})
    transport = httpx.ASGITransport(app=create_app(redis, access))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"authorization": "Bearer t"}
    ) as api:
        assert await ids(api, name=run_id) == [f"{run_id}-seen"]
        assert await ids(api, name=run_id, project="hidden") == []


async def test_an_ended_run_is_not_sent_again(api, redis, run_id):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    first = await api.get(route)
    assert (await api.get(route, headers={"if-none-match": first.headers["etag"]})).status_code == 200, "it runs"
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    ended = await api.get(route)
    assert ended.headers["etag"] != first.headers["etag"]
    for header, status in (
        (ended.headers["etag"], 304),
        (f'"x", {ended.headers["etag"]}', 304),
        (first.headers["etag"], 200),
    ):
        again = await api.get(route, headers={"if-none-match": header})
        assert (again.status_code, again.headers["etag"]) == (status, ended.headers["etag"])
    await api.post(f"{route}/resume")
    assert (await api.get(route, headers={"if-none-match": ended.headers["etag"]})).status_code == 200


async def test_a_repeated_submission_adds_one_run(api, redis, run_id):
    body, key = {"recipe": recipe_document("/model")}, {"idempotency-key": run_id}
    answers = await asyncio.gather(*(api.post("/v1/runs", json=body, headers=key) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    [run] = {answer.json()["id"] for answer in answers}
    other = await api.post("/v1/runs", json=body | {"project": "another"}, headers=key)
    assert (other.status_code, "had this key and another body" in other.json()["detail"]) == (422, True)
    assert (await api.post("/v1/runs", json=body, headers={"idempotency-key": f"{run_id}-b"})).json()["id"] != run
    assert (await api.post("/v1/runs", json=body, headers={"idempotency-key": "²".encode()})).status_code == 422
    named = {"id": f"{run_id}-named"} | body
    key = {"idempotency-key": f"{run_id}-c"}
    answers = await asyncio.gather(*(api.post("/v1/runs", json=named, headers=key) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [201]
    assert (await api.post("/v1/runs", json=named)).status_code == 409


async def test_another_principal_has_keys_of_its_own(api, redis, run_id):
    body, key = {"recipe": recipe_document("/model")}, {"idempotency-key": run_id}
    first = (await api.post("/v1/runs", json=body, headers=key)).json()["id"]
    access = TokenAccess({token_digest("t"): Principal("someone", {"default": Role.OPERATOR})})
    transport = httpx.ASGITransport(app=create_app(redis, access))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"authorization": "Bearer t"}
    ) as other:
        answer = await other.post("/v1/runs", json=body, headers=key)
    assert (answer.status_code, answer.json()["id"] == first) == (201, False)


async def test_a_key_of_a_deleted_run_adds_no_other(own_server, run_id):
    _, redis = own_server
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as api:
        body, key = {"recipe": recipe_document("/model")}, {"idempotency-key": run_id}
        run = (await api.post("/v1/runs", json=body, headers=key)).json()["id"]
        await redis.unlink(f"penstock:{{{run}}}:record")
        answer = await api.post("/v1/runs", json=body, headers=key)
    assert (answer.status_code, "was deleted" in answer.json()["detail"]) == (409, True)
