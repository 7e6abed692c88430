"""Owns the tests of the command that lists the places a run avoids, and makes it try one again.

Must not start a process that holds a place; test_placed.py does.
"""

import asyncio
import json
import time

import pytest

from services.settings import parse_recipe
from services.streams.connection.client import connect
from services.streams.keys import RunKeys
from services.streams.runs.places import AVOIDED_S, AvoidedPlace, avoid
from services.streams.state.runs import RunRecords
from tests.deploy.command_line import penstock
from tests.harness.small_run import recipe_document

UNTIL = time.time() + AVOIDED_S
NODE = AvoidedPlace(service="learner", node="a", count=3, reason="ranks failed", until=UNTIL)
LOST = AvoidedPlace(service="rollout", node="a", device="GPU-1", count=1, reason="Xid 79", until=UNTIL, kind="xid")


@pytest.fixture
def run(redis_url, run_id):
    async def prepare():
        redis = await connect(redis_url)
        try:
            await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")))
            for place in (NODE, LOST):
                await avoid(redis, RunKeys(run_id), place)
        finally:
            await redis.aclose()

    asyncio.run(prepare())
    return run_id


def test_places_are_listed_and_tried_again_by_name(run, redis_url, monkeypatch):
    status, shown = penstock("places", run)
    assert (status, "--redis: '' is not valid" in shown) == (2, True)
    monkeypatch.setenv("PENSTOCK_REDIS", redis_url)
    status, shown = penstock("places", run, "--json")
    assert (status, [place["name"] for place in json.loads(shown)]) == (0, ["learner a", "rollout a GPU-1"])
    status, shown = penstock("places", run)
    assert status == 0
    assert [line.split("  ")[0].strip() for line in shown.splitlines()] == ["place", "learner a", "rollout a GPU-1"]
    status, shown = penstock("places", run, "--retry", "rollout a")
    assert (status, "expected one of 'learner a', 'rollout a GPU-1'" in shown) == (2, True), shown
    for place, left in ((LOST, [NODE]), (NODE, [])):
        status, shown = penstock("places", run, "--retry", place.name, "--json")
        assert (status, [found["name"] for found in json.loads(shown)]) == (0, [other.name for other in left])
    assert penstock("places", run) == (0, f"run {run} avoids no place\n")
    status, shown = penstock("places", f"{run}-none")
    assert (status, shown) == (2, f"penstock: run '{run}-none' does not exist\n")
