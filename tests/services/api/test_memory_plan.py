"""A run's plan is compared with Redis' memory when it is submitted or resumed, and once its prompts are loaded."""

import asyncio
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest

from services.api.app import create_app
from services.contracts import RunState, nucleus_limit
from services.sampler.service import SamplerService
from services.settings import RecipeError, parse_recipe
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import pack
from services.streams.memory_bound import footprint, most_inflight_groups, with_prompts
from services.streams.memory_plan import compare_loaded
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.small_run import recipe_document, service_context
from tests.services.api.submitting import submitted
from tests.services.driven import BODY

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
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as api:
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
    assert (await api.get("/v1/runs")).json() == {"runs": [], "next": None}
    # What the refusal names is accepted, and one group more is not.
    assert (await api.post("/v1/runs", json={"recipe": with_groups(31)})).status_code == 201
    await limit(2**20)
    refused = await api.post("/v1/runs", json={"recipe": RECIPE})
    assert "32 is not valid: expected a recipe with a smaller plan, as no valid number of groups fits;" in refused.text


async def test_the_plan_of_a_tuned_run_is_that_of_its_bounds(limited):
    api, _, limit = limited
    await limit(PLAN - 1)
    bounds = {"inflight_groups": [8, 32]}
    tuned = recipe_document("/model", limits={"max_inflight_groups": 8}, tuning={"mode": "on", **bounds})
    refused = await api.post("/v1/runs", json={"recipe": tuned})
    assert "tuning.inflight_groups: 32 is not valid: expected at most 31; the run may need" in refused.text
    told = {**tuned, "tuning": {"mode": "report", **bounds}}
    accepted = await api.post("/v1/runs", json={"recipe": told, "id": "told"})
    assert accepted.status_code == 201
    refused = await api.patch("/v1/runs/told", json={"tuning.mode": "on"})
    assert "tuning.inflight_groups: 32 is not valid: expected at most 31" in refused.text


def test_the_most_groups_that_fit_are_found_exactly():
    recipe = parse_recipe(with_groups(1000))
    for groups in (8, 9, 500, 999, 1000):
        need = footprint(parse_recipe(with_groups(groups))).total
        assert most_inflight_groups(recipe, need) == groups
    assert recipe.least_inflight_groups == 8
    assert most_inflight_groups(recipe, footprint(parse_recipe(with_groups(8))).total - 1) is None


def test_the_plan_has_room_for_the_largest_nuclei():
    """Each of the longest responses of a group in flight, as it is stored."""
    tokens, top_k = 16, 20
    plans = [footprint(parse_recipe(recipe_document("/model", rollout={"top_k": k}))) for k in (None, top_k)]
    without, with_nuclei = (plan.parts["groups in flight"] for plan in plans)
    ids = np.tile(np.arange(nucleus_limit(top_k), dtype=np.int32), tokens)
    offsets = nucleus_limit(top_k) * np.arange(tokens + 1, dtype=np.int32)
    largest = replace(BODY, response_ids=np.zeros(tokens, np.int32), behaviour_logprobs=np.zeros(tokens, np.float32))
    stored = [sum(map(len, pack(body).values())) for body in (largest, replace(largest, nuclei=Nuclei(ids, offsets)))]
    assert 0 <= stored[1] - stored[0] - (with_nuclei - without) / (32 * 4) <= 4


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


@pytest.mark.parametrize(
    ("sections", "lacking"),
    [
        ({"data": {"source": "jsonl", "path": "/data", "train": None}}, "training prompt in the file"),
        (
            {"evaluation": {"samples": 32, "sets": [{"name": "big", "source": "jsonl", "path": "/x.jsonl"}]}},
            "prompt of a set evaluated in full",
        ),
    ],
)
async def test_what_the_plan_lacks_is_always_told(limited, sections, lacking):
    """However far below maxmemory the plan without it is."""
    api, _, limit = limited
    document = recipe_document("/model", **sections)
    need = footprint(parse_recipe(document))
    await limit(need.total * 10)
    [text] = (await api.post("/v1/runs", json={"recipe": document})).json()["warnings"]
    assert f"without {need.unsized[lacking]:,} bytes for each {lacking}; if the plan with all prompts is above" in text


async def test_a_plan_above_the_free_memory_is_told(limited):
    api, redis, limit = limited
    await redis.setrange("other", 3 * PLAN, "x")
    used = (await redis.info("memory"))["used_memory"]
    await limit(used + PLAN // 2)
    [text] = (await api.post("/v1/runs", json={"recipe": RECIPE})).json()["warnings"]
    assert text.startswith(f"the run may need {mib(PLAN)} of Redis, of which ")
    assert text.endswith(" are free now: the run may wait for memory until others free some")


async def test_the_loaded_prompts_are_compared_again(limited, tmp_path, run_id):
    _, redis, limit = limited
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"name": "all", "source": "jsonl", "path": str(path), "layout": "fields"}
    document = recipe_document("/model", evaluation={"sets": [held_out]})
    recipe = parse_recipe(document)
    whole = footprint(with_prompts(recipe, 32, {"all": 300}))
    assert whole.unsized == {}
    async with service_context(redis, run_id, document, "sampler") as context:
        await limit(whole.total - 1)
        assert footprint(recipe).total < whole.total - 1, "nothing is wrong at submit"
        with pytest.raises(RecipeError, match=f"the run may need {mib(whole.total)} of Redis, and its maxmemory is "):
            await SamplerService().run(context)
        # A run that has trained goes on.
        await redis.hset(context.keys.policy, mapping={"version": 1, "step": 1})
        context.stopping.set()
        await asyncio.wait_for(SamplerService().run(context), 60)
        await limit(whole.total)
        await compare_loaded(redis, recipe, 32, {"all": 300})
        # The plan of a recipe without such files was compared when the run was submitted.
        await limit(2**20)
        await compare_loaded(redis, parse_recipe(RECIPE), 32, {})


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
