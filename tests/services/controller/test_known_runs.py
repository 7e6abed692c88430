"""The controller's loop reads active runs, and of all others only what has changed."""

import pytest

from services.contracts import RunState
from services.controller.ended.known_runs import KnownRuns
from services.settings import parse_recipe
from services.streams.keys import ACTIVE_RUNS
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

RECIPE = parse_recipe(recipe_document("/model"))


@pytest.fixture
async def records(own_server):
    return RunRecords(own_server[1])


async def ended(records, *runs, state=RunState.FAILED):
    for run in runs:
        await records.create(run, RECIPE)
        await records.transition(run, state, "test")


async def looked(known):
    """Two looks, which must be equal: the ids of active runs, and how the others ended."""
    found = []
    for _ in range(2):
        active = [record.id for record in await known.look()]
        found.append((active, {run: standing.state.value for run, standing in known.ended.runs.items()}))
        assert sum(known.ended.states.values()) == len(known.ended.runs)
    assert found[0] == found[1]
    return found[1]


async def test_runs_that_begin_end_resume_and_end_again(own_server, records):
    known = KnownRuns(own_server[1], records)
    assert await looked(known) == ([], {})
    await records.create("b", RECIPE)
    await records.create("a", RECIPE)
    assert await looked(known) == (["b", "a"], {})
    await records.transition("b", RunState.CANCELLED, "test")
    assert await looked(known) == (["a"], {"b": "cancelled"})
    await records.transition("a", RunState.SUCCEEDED, "test")
    assert await looked(known) == ([], {"a": "succeeded", "b": "cancelled"})
    await records.resume("b")
    assert await looked(known) == (["b"], {"a": "succeeded"})
    await records.transition("b", RunState.FAILED, "test")
    assert await looked(known) == ([], {"b": "failed", "a": "succeeded"})
    assert known.ended.states == {RunState.FAILED: 1, RunState.SUCCEEDED: 1}


async def test_a_look_without_changes_reads_no_ended_run(own_server, records):
    _, redis = own_server
    await ended(records, *(f"ended-{number}" for number in range(20)))
    await records.create("active", RECIPE)
    known = KnownRuns(redis, records)
    await known.look()
    await redis.config_resetstat()
    assert [record.id for record in await known.look()] == ["active"]
    own = {"cmdstat_config|resetstat", "cmdstat_info", "cmdstat_ping"}
    calls = {name: about["calls"] for name, about in (await redis.info("commandstats")).items() if name not in own}
    assert calls == {"cmdstat_zcard": 1, "cmdstat_smembers": 1, "cmdstat_hgetall": 1}


async def test_runs_of_an_earlier_release_are_found(own_server, records):
    _, redis = own_server
    await ended(records, "old-failed")
    await records.create("old-running", RECIPE)
    await redis.delete(ACTIVE_RUNS)
    known = KnownRuns(redis, records)
    await known.look()
    assert await looked(known) == (["old-running"], {"old-failed": "failed"})
    await records.create("created", RECIPE)
    await redis.srem(ACTIVE_RUNS, "created")
    await known.look()
    assert (await looked(known))[0] == ["old-running", "created"], "the number of runs has changed"
    await records.resume("old-failed")
    await redis.srem(ACTIVE_RUNS, "old-failed")
    restarted = KnownRuns(redis, records)
    await restarted.look()
    assert await looked(restarted) == (["old-failed", "old-running", "created"], {})
