"""Ledgers by REST: what a run and a project used, who may read them, and budgets at submit, edit and resume."""

import pytest

from services.api.access.roles import Principal, Role
from services.contracts import Lane, Release, RunState
from services.settings import parse_recipe
from services.settings.operator.prices import VARIABLE
from services.streams.keys import PROJECTS, RunKeys, project_ledger
from services.streams.runs.ledger import BUSY, COST, CPU_MS, GPU_MS, IDLE, LedgerWriter, charged_field
from services.streams.state.ownership import become_owner
from services.streams.state.runs import OWNER, RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.small_run import recipe_document
from tests.services.api.access.platforms import client_of
from tests.services.driven import DrivenRun

PRICES = '{"currency": "USD", "gpu_hour": 2.5, "cpu_hour": 0.04}'


@pytest.fixture
async def priced(redis, monkeypatch):
    """A client of a platform that states prices."""
    monkeypatch.setenv(VARIABLE, PRICES)
    async with client_of(redis, ACCESS, HEADERS) as client:
        yield client


async def used_run(redis, run, project, **limits):
    """A run in a project, with 4 tokens filtered and 4 in flight, and 3 hours of GPU, a third of them idle."""
    await RunRecords(redis).create(run, parse_recipe(recipe_document("/model", limits=limits)), project=project)
    keys = RunKeys(run)
    driven = await DrivenRun.open(redis, keys, new=False)
    await driven.decided("g0", Release.FILTERED)
    await driven.published("g1")
    hour = 3_600_000
    await LedgerWriter(redis, keys, await become_owner(redis, keys, OWNER), project).charge(
        1.5,
        {
            charged_field("rollout", BUSY, GPU_MS): 2 * hour,
            charged_field("rollout", BUSY, CPU_MS): 4 * hour,
            charged_field("rollout", BUSY, COST, "USD"): 5_160_000_000,
            charged_field("rollout", IDLE, GPU_MS): hour,
            charged_field("rollout", IDLE, COST, "USD"): 2_500_000_000,
        },
    )
    return driven


async def test_a_run_shows_what_it_used(priced, redis, run_id):
    await used_run(redis, run_id, "default", budget=25.0)
    found = (await priced.get(f"/v1/runs/{run_id}/ledger")).json()
    rows = {row["use"]: row for row in found.pop("rows")}
    unused = dict.fromkeys(("trained", "stale", "dead", "evaluated", "discarded"), 0)
    assert found == {
        "run": run_id,
        "project": "default",
        "closes": True,
        "currency": "USD",
        "prices": {"gpu_hour": 2.5, "cpu_hour": 0.04},
        "budget": 25.0,
        "gpu_hours_limit": None,
        "tokens": {"generated": 8, "filtered": 4, "in_flight": 4, **unused},
        "gpu_seconds": 10800.0,
        "cpu_seconds": 14400.0,
        "cost": 7.66,
        "since": 1.5,
    }
    assert rows["filtered"] == {
        "use": "filtered",
        "tokens": 4,
        "share": pytest.approx(1 / 3),
        "gpu_seconds": 3600.0,
        "cpu_seconds": 7200.0,
        "cost": 2.58,
    }
    assert [(use, row["gpu_seconds"]) for use, row in rows.items() if row["gpu_seconds"]] == [
        ("filtered", 3600.0),
        ("in_flight", 3600.0),
        ("idle", 3600.0),
    ]


async def test_a_project_shows_what_its_runs_used(api, redis, run_id):
    project = f"{run_id}-p"
    for name in "ab":
        await used_run(redis, f"{run_id}-{name}", project)
    [found] = (await api.get("/v1/ledger", params={"project": project})).json()["projects"]
    assert (found["project"], found["runs"], found["closes"], found["currency"]) == (project, 2, True, "USD")
    assert (found["tokens"]["generated"], found["gpu_seconds"], found["cost"]) == (16, 21600.0, 15.32)
    assert sum(row["cost"] for row in found["rows"]) == pytest.approx(found["cost"])
    listed = [other["project"] for other in (await api.get("/v1/ledger")).json()["projects"]]
    assert project in listed
    assert listed == sorted(listed)
    assert (await api.get("/v1/ledger", params={"project": f"{project}-none"})).json()["projects"] == []
    await redis.srem(PROJECTS, project)
    await redis.unlink(project_ledger(project))


async def test_only_visible_projects_are_shown(api, redis, run_id, monkeypatch):
    project = f"{run_id}-p"
    await used_run(redis, run_id, project)
    role = {"default": Role.VIEWER}

    async def viewer(*_):
        return Principal("viewer", role)

    monkeypatch.setattr("services.api.access.tokens.TokenAccess.identify", viewer)
    assert project not in [found["project"] for found in (await api.get("/v1/ledger")).json()["projects"]]
    assert (await api.get(f"/v1/runs/{run_id}/ledger")).status_code == 404
    role = {project: Role.VIEWER}
    assert [found["project"] for found in (await api.get("/v1/ledger")).json()["projects"]] == [project]
    assert (await api.get(f"/v1/runs/{run_id}/ledger")).status_code == 200


async def test_a_run_of_another_release_has_an_empty_ledger(api, redis, run_id):
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")))
    await redis.hset(RunKeys(run_id).lane(Lane.TRAIN).counters, mapping={"dispatched": 3, "trained": 3})
    await redis.hset(RunKeys(run_id).record, "recipe", '{"unknown": 1}')
    answer = await api.get(f"/v1/runs/{run_id}/ledger")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["closes"], found["since"], found["cost"], found["currency"]) == (True, None, None, None)
    assert {row["gpu_seconds"] for row in found["rows"]} == {0.0}
    assert (await api.get("/v1/runs/absent/ledger")).status_code == 404


async def test_a_budget_needs_prices(api, redis, run_id, monkeypatch):
    body = {"recipe": recipe_document("/model", limits={"budget": 25.0}), "id": run_id}
    answer = await api.post("/v1/runs", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "limits.budget"
    hours = {"recipe": recipe_document("/model", limits={"gpu_hours": 2.0}), "id": f"{run_id}-hours"}
    assert (await api.post("/v1/runs", json=hours)).status_code == 201
    refused = await api.patch(f"/v1/runs/{run_id}-hours", json={"limits.budget": 5.0})
    assert refused.status_code == 422, refused.text
    monkeypatch.setenv(VARIABLE, PRICES)
    async with client_of(redis, ACCESS, HEADERS) as priced:
        assert (await priced.post("/v1/runs", json=body)).status_code == 201


async def test_a_run_with_a_spent_budget_is_not_resumed(priced, redis, run_id):
    await used_run(redis, run_id, "default", budget=7.5, gpu_hours=4.0)
    await RunRecords(redis).transition(run_id, RunState.FAILED, "limits.budget: 7.50 USD is spent (7.66)")
    answer = await priced.post(f"/v1/runs/{run_id}/resume")
    assert answer.status_code == 409
    assert "cannot be resumed: limits.budget: 7.50 USD is spent (7.66); raise it first" in answer.json()["detail"]
    for changes in ({"limits.budget": 0}, {"limits.gpu_hours": -1.0}, {"limits.budget": "x"}):
        assert (await priced.patch(f"/v1/runs/{run_id}", json=changes)).status_code == 422
    edited = (await priced.patch(f"/v1/runs/{run_id}", json={"limits.budget": 50.0})).json()
    assert edited["edits"][-1]["changes"] == {"limits.budget": [7.5, 50.0]}
    assert (await priced.patch(f"/v1/runs/{run_id}", json={"limits.gpu_hours": 2.0})).status_code == 202
    answer = await priced.post(f"/v1/runs/{run_id}/resume")
    assert "limits.gpu_hours: 2 GPU hours are spent (3)" in answer.json()["detail"]
    edited = (await priced.patch(f"/v1/runs/{run_id}", json={"limits.gpu_hours": None})).json()
    assert edited["recipe"]["limits"]["gpu_hours"] is None
    assert (await priced.post(f"/v1/runs/{run_id}/resume")).status_code == 202
