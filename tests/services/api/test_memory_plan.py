"""A run's plan is compared with Redis' maxmemory when it is submitted or resumed."""

import httpx
import pytest

from services.api.app import create_app
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.memory_bound import footprint, most_inflight_groups
from tests.harness.small_run import recipe_document
from tests.services.api.submitting import submitted

RECIPE = recipe_document("/model")
PLAN = footprint(parse_recipe(RECIPE)).total


def mib(size):
    return f"{size / 2**20:,.0f} MiB"


def with_groups(groups):
    return recipe_document("/model", limits={"max_inflight_groups": groups})


@pytest.fixture
async def limited(own_server):
    """The API over a server of the test's own, and how to set its maxmemory in bytes."""
    _, redis = own_server
    transport = httpx.ASGITransport(app=create_app(redis))
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as api:
        yield api, redis, lambda limit: redis.config_set("maxmemory", limit)


async def events_of(api, run):
    view = (await api.get(f"/v1/runs/{run}")).json()
    return [event["text"] for event in view["events"] if event["phase"] == "redis-memory-planned"]


async def test_a_plan_above_maxmemory_is_refused_with_what_fits(limited):
    api, _, limit = limited
    await limit(PLAN - 1)
    refused = await api.post("/v1/runs", json={"recipe": RECIPE})
    detail = refused.json()["detail"]
    assert refused.status_code == 422
    assert detail.startswith("limits.max_inflight_groups: 32 is not valid: expected at most 31; the run may need ")
    assert f"{mib(PLAN)} of Redis, and its maxmemory is {mib(PLAN - 1)}" in detail
    assert (await api.get("/v1/runs")).json() == {"runs": []}
    # What the refusal names is accepted, and one group more is not.
    assert (await api.post("/v1/runs", json={"recipe": with_groups(31)})).status_code == 201
    await limit(2**20)
    refused = await api.post("/v1/runs", json={"recipe": RECIPE})
    assert "32 is not valid: expected a recipe with a smaller plan, as no valid number of groups fits;" in refused.text


def test_the_most_groups_that_fit_are_found_exactly():
    recipe = parse_recipe(with_groups(1000))
    for groups in (8, 9, 500, 999, 1000):
        need = footprint(parse_recipe(with_groups(groups))).total
        assert most_inflight_groups(recipe, need) == groups
    assert recipe.least_inflight_groups == 8
    assert most_inflight_groups(recipe, footprint(parse_recipe(with_groups(8))).total - 1) is None


async def test_a_plan_near_maxmemory_is_told(limited, run_id):
    api, _, limit = limited
    await limit(int(PLAN / 0.7) + 1)
    assert (await api.post("/v1/runs", json={"recipe": RECIPE})).json()["warnings"] == []
    await limit(int(PLAN / 0.7) - 1)
    view = (await api.post("/v1/runs", json={"recipe": RECIPE, "id": run_id})).json()
    near, together = view["warnings"]
    assert f"more than 70% of its maxmemory of {mib(PLAN / 0.7)}" in near
    assert f"with the plans of 1 runs that have not ended, this run's is {mib(2 * PLAN)} of Redis" in together
    assert await events_of(api, run_id) == [near, together]


async def test_only_runs_that_have_not_ended_count(limited, run_id):
    api, redis, limit = limited
    await submitted(api, redis, f"{run_id}-old", RunState.CANCELLED)
    await limit(int(PLAN * 1.5))
    view = (await api.post("/v1/runs", json={"recipe": RECIPE, "id": run_id})).json()
    assert view["warnings"] == []
    assert await events_of(api, run_id) == []


async def test_a_server_without_a_limit_takes_every_plan(limited):
    api, _, _ = limited
    view = await api.post("/v1/runs", json={"recipe": with_groups(10**9)})
    assert (view.status_code, view.json()["warnings"]) == (201, [])


async def test_a_warning_states_what_the_plan_lacks(limited):
    api, _, limit = limited
    document = recipe_document("/model", data={"source": "jsonl", "path": "/data", "train": None})
    need = footprint(parse_recipe(document))
    await limit(need.total + 1)
    [text] = (await api.post("/v1/runs", json={"recipe": document})).json()["warnings"]
    assert f"without {need.unsized['training prompt in the file']:,} bytes for each training prompt in the file" in text


async def test_a_run_that_ended_is_resumed_only_if_its_plan_fits(limited, run_id):
    api, redis, limit = limited
    path = await submitted(api, redis, run_id, RunState.CANCELLED)
    await limit(PLAN - 1)
    refused = await api.post(f"{path}/resume")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("limits.max_inflight_groups: 32 is not valid: expected at most 31;")
    assert (await api.get(path)).json()["state"] == "cancelled"
    await limit(PLAN)
    resumed = (await api.post(f"{path}/resume")).json()
    assert resumed["state"] == "queued"
    assert await events_of(api, run_id) == resumed["warnings"] != []


async def test_a_paused_run_is_resumed_whatever_its_plan(limited, run_id):
    api, redis, limit = limited
    path = await submitted(api, redis, run_id, RunState.RUNNING, RunState.PAUSED)
    await limit(2**20)
    resumed = await api.post(f"{path}/resume")
    assert (resumed.status_code, resumed.json()["warnings"]) == (202, [])
