"""The routes that archive runs, and those that archive or delete many of them."""

import httpx
import pytest

from services.api.access.roles import Principal, Role
from services.api.access.tokens import TokenAccess, token_digest
from services.api.app import create_app
from services.contracts import Closing, RunState
from services.controller.ended.closings import Closings
from services.settings import parse_recipe
from services.streams.keys import ENDED_RUNS, UNCLOSED_RUNS, RunKeys
from services.streams.runs import many
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted
from tests.services.driven import DrivenRun

RECIPE = parse_recipe(recipe_document("/model"))
DAY = 86400.0


async def ended(redis, run, state=RunState.FAILED, ago=0.0, project="default"):
    """A run that ended some seconds ago."""
    records = RunRecords(redis)
    await records.create(run, RECIPE, project=project)
    await records.transition(run, state, "test")
    seconds, _ = await redis.time()
    for key in (ENDED_RUNS, UNCLOSED_RUNS):
        await redis.zadd(key, {run: seconds - ago})


async def closed(redis, tmp_path, run):
    """As the controller does it."""
    await Closings(redis, tmp_path)._close(run)
    return await RunRecords(redis).get(run)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED, RunState.SUCCEEDED])
async def test_an_archived_run_keeps_what_users_read(api, redis, run_id, tmp_path, state):
    route = await submitted(api, redis, run_id, RunState.RUNNING)
    driven = await DrivenRun.open(redis, RunKeys(run_id))
    await driven.trained(1, "g0")
    await driven.dispatched("g1")
    await redis.hset(RunKeys(run_id).reward_files, "./rewards.py", "text")
    await RunRecords(redis).transition(run_id, state, "test")
    before = (await api.get(route)).json()
    answer = await api.post(f"{route}/archive")
    assert (answer.status_code, answer.json()["closing"]) == (202, "archiving")
    record = await closed(redis, tmp_path, run_id)
    assert record.closing is Closing.ARCHIVED
    prefix = RunKeys(run_id).key("")
    left = {key.decode().removeprefix(prefix) async for key in redis.scan_iter(match=f"{prefix}*", count=1000)}
    kept = {"counters", "epoch:learner", "epoch:sampler", "events", "pending", "policy", "record", "steps"}
    assert left <= kept | {"heartbeats"}
    shown = (await api.get(route)).json()
    assert (shown["closing"], shown["groups"]) == ("archived", before["groups"])
    assert shown["events"][-1]["phase"] == "archived"
    assert len((await api.get(f"{route}/metrics")).json()["steps"]) == 1
    refused = await api.post(f"{route}/resume")
    assert (refused.status_code, "was archived" in refused.json()["detail"] or state.value == "succeeded") == (
        409,
        True,
    )
    assert run_id in [run["id"] for run in (await api.get("/v1/runs", params={"archived": True})).json()["runs"]]
    assert (await api.post(f"{route}/archive")).status_code == 202, "it may be repeated"
    assert (await api.delete(route)).json()["closing"] == "deleting"
    assert (await api.post(f"{route}/archive")).status_code == 409


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.PAUSED])
async def test_an_active_run_is_not_archived(api, redis, run_id, state):
    route = await submitted(api, redis, run_id, state)
    refused = await api.post(f"{route}/archive")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"run {run_id!r} is {state.value}; cancel it first")


async def closing_of(redis, *runs):
    return [(await RunRecords(redis).get(run)).closing for run in runs]


@pytest.mark.parametrize(("method", "path", "closing"), [("POST", "/archive", "archiving"), ("DELETE", "", "deleting")])
async def test_many_old_runs_are_closed_at_once(own_api, own_server, method, path, closing):
    _, redis = own_server
    await ended(redis, "old-failed", ago=40 * DAY)
    await ended(redis, "old-cancelled", RunState.CANCELLED, ago=50 * DAY)
    await ended(redis, "old-succeeded", RunState.SUCCEEDED, ago=60 * DAY)
    await ended(redis, "new-failed", ago=DAY)
    await RunRecords(redis).create("queued", RECIPE)
    wanted = {"older_than": 30 * DAY, "state": ["failed", "cancelled"]}
    found = await own_api.request(method, f"/v1/runs{path}", params=wanted | {"dry_run": True})
    assert found.status_code == 202, found.text
    assert [run["id"] for run in found.json()["runs"]] == ["old-cancelled", "old-failed"]
    assert (found.json()["dry_run"], found.json()["more"]) == (True, False)
    assert await closing_of(redis, "old-failed", "old-cancelled") == [None, None]
    done = (await own_api.request(method, f"/v1/runs{path}", params=wanted)).json()
    assert [(run["id"], run["closing"]) for run in done["runs"]] == [
        ("old-cancelled", closing),
        ("old-failed", closing),
    ]
    assert await closing_of(redis, "old-succeeded", "new-failed", "queued") == [None] * 3
    again = (await own_api.request(method, f"/v1/runs{path}", params=wanted)).json()
    assert again["runs"] == [], "they are being closed"
    rest = (await own_api.request(method, f"/v1/runs{path}", params={"older_than": 0})).json()
    assert {run["id"] for run in rest["runs"]} == {"old-succeeded", "new-failed"}


@pytest.mark.parametrize(("method", "path"), [("POST", "/archive"), ("DELETE", ""), ("DELETE", "/old")])
async def test_a_misspelt_dry_run_closes_nothing(own_api, own_server, method, path):
    _, redis = own_server
    await ended(redis, "old", ago=100)
    answer = await own_api.request(method, f"/v1/runs{path}", params={"dryrun": True})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "query"
    assert answer.json()["detail"].startswith("query: 'dryrun' is not valid: expected one of ")
    assert await closing_of(redis, "old") == [None]


async def test_a_request_closes_a_limited_number_of_runs(own_api, own_server, monkeypatch):
    _, redis = own_server
    monkeypatch.setattr(many, "CLOSED_AT_ONCE", 3)
    for number in range(5):
        await ended(redis, f"run-{number}", ago=100 - number)
    first = (await own_api.post("/v1/runs/archive", params={"older_than": 10})).json()
    assert ([run["id"] for run in first["runs"]], first["more"]) == (["run-0", "run-1", "run-2"], True)
    second = (await own_api.post("/v1/runs/archive", params={"older_than": 10})).json()
    assert ([run["id"] for run in second["runs"]], second["more"]) == (["run-3", "run-4"], False)


async def test_a_slow_server_closes_some_runs_per_request(own_api, own_server, monkeypatch):
    _, redis = own_server
    monkeypatch.setattr(many, "CLOSED_WITHIN_S", 0.0)
    for number in range(2):
        await ended(redis, f"run-{number}", ago=100 - number)
    answers = [(await own_api.delete("/v1/runs", params={"older_than": 10})).json() for _ in range(3)]
    assert [([run["id"] for run in each["runs"]], each["more"]) for each in answers] == [
        (["run-0"], True),
        (["run-1"], False),
        ([], False),
    ]


async def test_only_runs_of_own_projects_are_closed(own_server):
    _, redis = own_server
    await ended(redis, "mine", ago=100, project="mine")
    await ended(redis, "read", ago=100, project="read")
    access = TokenAccess({token_digest("t"): Principal("someone", {"mine": Role.ADMIN, "read": Role.OPERATOR})})
    transport = httpx.ASGITransport(app=create_app(redis, access))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"authorization": "Bearer t"}
    ) as api:
        done = (await api.delete("/v1/runs", params={"older_than": 0})).json()
        assert [run["id"] for run in done["runs"]] == ["mine"]
        assert (await api.delete("/v1/runs", params={"older_than": 0, "project": "read"})).json()["runs"] == []
    assert await closing_of(redis, "read") == [None]


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "30d", "", None])
async def test_an_age_that_is_not_valid_closes_nothing(api, value):
    for method, path in (("POST", "/archive"), ("DELETE", "")):
        answer = await api.request(method, f"/v1/runs{path}", params={} if value is None else {"older_than": value})
        assert (answer.status_code, "older_than" in answer.json()["detail"]) == (422, True), answer.text


async def memory_of(redis, run):
    """Bytes of the run's keys but its record."""
    keys = RunKeys(run)
    names = [key async for key in redis.scan_iter(match=keys.key("*"), count=1000) if key.decode() != keys.record]
    return sum([await redis.memory_usage(name) for name in names])


async def test_a_run_that_succeeded_leaves_little_memory_once_expired(own_server, run_id, tmp_path):
    _, redis = own_server
    await ended(redis, run_id, RunState.SUCCEEDED)
    driven = await DrivenRun.open(redis, RunKeys(run_id))
    for number in range(40):
        await driven.dispatched(f"g{number}")
    await EventLog(redis, RunKeys(run_id), "test").write("stalled", "a line")
    before = await memory_of(redis, run_id)
    await many.close_run(redis, run_id, Closing.EXPIRING)
    assert (await closed(redis, tmp_path, run_id)).closing is Closing.EXPIRED
    assert await memory_of(redis, run_id) < before / 4
