"""Samples and the stories of groups: what the archive and Redis have of them, over REST."""

from __future__ import annotations

import asyncio

import pytest

from services.api.routes.reading import samples
from services.sampler.archive.archivist import Archivist
from services.sampler.watches.memory import RedisMemory
from services.streams.state.group_counts import group_counts
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import DrivenRun


@pytest.fixture
async def story(redis, run_id, tmp_path, monkeypatch):
    """A run with a filtered, a trained and a pending group; the first two are archived."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path))
    samples._archive.cache_clear()
    document = recipe_document("/none", algorithm={"group_size": 2}, limits={"max_inflight_groups": 8})
    async with service_context(redis, run_id, document, "sampler") as context:
        run = await DrivenRun.open(redis, context.keys, new=False)
        archivist = Archivist(context, RedisMemory(context))
        archivist.open(run.sampler)
        await run.decided("g0", "filtered")
        await run.learner.release_batch(await run.trained(1, "g1"))
        await run.dispatched("g2")
        await archivist.drain()
        yield run
    samples._archive.cache_clear()


async def test_samples_are_listed_searched_and_paged(api, story, run_id):
    route = f"/v1/runs/{run_id}/samples"
    found = (await api.get(route)).json()
    assert {(sample["group"], sample["index"]) for sample in found["samples"]} >= {("g0", 0), ("g0", 1)}
    filtered = (await api.get(route, params={"release": "filtered"})).json()["samples"]
    assert {sample["group"] for sample in filtered} == {"g0"}
    assert all(sample["text"] == "zwölf" and sample["versions"] == [3, 4] for sample in filtered)
    assert (await api.get(route, params={"text": "ZWÖLF", "release": "filtered"})).json()["samples"] == filtered
    assert (await api.get(route, params={"text": "elf.*"})).json()["samples"] == []
    first = (await api.get(route, params={"limit": 1})).json()
    second = (await api.get(route, params={"limit": 1, "after": first["next"]})).json()
    assert first["samples"] != second["samples"]


async def test_samples_of_the_archive_equal_the_counters(api, redis, story, run_id):
    counts = await group_counts(redis, story.keys)
    found = (await api.get(f"/v1/runs/{run_id}/samples", params={"limit": 200})).json()["samples"]
    ended = {sample["group"]: sample["release"] for sample in found}
    assert sorted(ended.values()) == ["filtered", "trained"]
    assert (counts.filtered, counts.trained, counts.pending) == (1, 1, 1)


async def test_a_group_tells_its_story(api, story, run_id):
    group = (await api.get(f"/v1/runs/{run_id}/groups/g0")).json()
    assert (group["release"], group["lane"], group["prompt"]["id"], group["problem"]) == (
        "filtered",
        "train",
        "p0",
        None,
    )
    (attempt,) = group["attempts"]
    assert attempt["step"] is None
    trained = (await api.get(f"/v1/runs/{run_id}/groups/g1")).json()["attempts"][0]
    assert (trained["release"], trained["step"], trained["optimizer_steps"]) == ("trained", 1, 2)
    assert (trained["optimizer_step"], trained["optimizer"]["loss"]) == (1, 0.25)
    assert (attempt["optimizer_step"], attempt["optimizer"]) == (None, None)
    assert [sample["index"] for sample in attempt["samples"]] == [0, 1]
    tokens = attempt["samples"][0]["tokens"]
    assert [(token["id"], token["logprob"], token["version"]) for token in tokens] == [(8, -0.5, 3), (9, -1.25, 4)]
    assert all(token["text"] is None for token in tokens), "its model is not here"


async def test_a_group_in_flight_shows_its_prompt(api, story, run_id):
    group = (await api.get(f"/v1/runs/{run_id}/groups/g2")).json()
    assert (group["release"], group["prompt"]["id"]) == (None, "p0")
    assert "0 of 2 samples are judged" in group["attempts"][0]["reason"]


@pytest.mark.parametrize("group", ["g9", "%2e%2e%2frun.json", "²", "a" * 500, "e.0", "\ud800"])
async def test_no_other_group_has_one(api, story, run_id, group):
    path = group.encode("utf-8", "surrogatepass").hex()
    assert (await api.get(f"/v1/runs/{run_id}/groups/{path if group == chr(0xD800) else group}")).status_code == 404


async def test_a_damaged_file_is_named_and_left_out(api, story, run_id, tmp_path):
    for part in (tmp_path / run_id / "groups").iterdir():
        part.write_bytes(b"no parquet")
    samples._archive.cache_clear()
    found, shown = await asyncio.gather(api.get(f"/v1/runs/{run_id}/samples"), api.get(f"/v1/runs/{run_id}/groups/g0"))
    assert (found.status_code, shown.status_code) == (200, 200)
    assert found.json()["problems"]
    assert shown.json()["problem"]
