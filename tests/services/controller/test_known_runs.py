"""The controller's loop reads active runs, and of all others only what has changed."""

import pytest

from services.contracts import Closing, RunState
from services.controller.ended.known_runs import KnownRuns
from services.settings import parse_recipe
from services.streams.keys import ACTIVE_RUNS, RUNS, RunKeys
from services.streams.state.ended.closing import close_run
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
        found.append((active, {run: state.value for run, state in known.ended.recent.items()}))
        assert sum(known.ended.states.values()) == len(known.ended.recent)
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
    assert {name: calls[name] for name in ("cmdstat_zrange", "cmdstat_smembers", "cmdstat_hgetall")} == {
        "cmdstat_zrange": 1,
        "cmdstat_smembers": 1,
        "cmdstat_hgetall": 1,
    }
    assert calls.keys() == {f"cmdstat_{name}" for name in ("zrange", "smembers", "hgetall", "zcard", "fcall")}


async def forget(redis, run):
    """As an earlier release adds a run: in none of the indices but that of all runs."""
    await redis.hdel(RunKeys(run).record, "listed")
    for key in await redis.keys("penstock:*"):
        if key.decode() != RUNS and b"{" not in key:
            await (redis.srem if await redis.type(key) == b"set" else redis.zrem)(key, run)


async def test_another_run_or_one_less_reads_no_ended_run(own_server, records):
    _, redis = own_server
    await ended(records, *(f"ended-{number}" for number in range(20)))
    known = KnownRuns(redis, records)
    await known.look()

    async def create() -> None:
        await records.create("new", RECIPE)

    async def delete() -> None:
        await close_run(redis, "ended-3", Closing.DELETING)

    for change in (create, delete):
        await change()
        await redis.config_resetstat()
        await known.look()
        stats = await redis.info("commandstats")
        assert stats["cmdstat_hgetall"]["calls"] <= 2
        assert stats["cmdstat_fcall"]["calls"] == 1, "the sizes of the indices, read together"
        assert not {"cmdstat_hmget", "cmdstat_hget", "cmdstat_sadd", "cmdstat_srem", "cmdstat_hset"} & stats.keys()


async def test_runs_of_an_earlier_release_are_found(own_server, records):
    _, redis = own_server
    await ended(records, "old-failed")
    await records.create("old-running", RECIPE)
    await redis.delete(ACTIVE_RUNS)
    known = KnownRuns(redis, records)
    await known.look()
    assert await looked(known) == (["old-running"], {"old-failed": "failed"})
    await records.create("created", RECIPE)
    await forget(redis, "created")
    await known.look()
    assert (await looked(known))[0] == ["old-running", "created"], "it is in no list of its state"
    await records.resume("old-failed")
    await redis.srem(ACTIVE_RUNS, "old-failed")
    restarted = KnownRuns(redis, records)
    await restarted.look()
    assert await looked(restarted) == (["old-failed", "old-running", "created"], {})
