"""How much may be redriven, on a real server: nothing into a full Redis, few groups at once, few names for long."""

import asyncio

import pytest

from services.contracts import Lane, Release
from services.streams.connection.functions import RedisFullError
from services.streams.keys import RunKeys
from services.streams.retention import REDRIVEN_PENDING
from services.streams.state import dead_letters
from services.streams.state.dead_letters import letters, redrive_all
from tests.services.streams.hand_lane import SAMPLES, Pipeline, given_up


@pytest.fixture
async def pipeline(redis, run_id):
    return await Pipeline(redis, RunKeys(run_id)).open()


async def test_a_full_redis_redrives_nothing_until_it_has_room(own_server, run_id):
    _, redis = own_server
    pipeline = await Pipeline(redis, RunKeys(run_id)).open()
    letter = await pipeline.dead_task("g0")
    await pipeline.dead_task("g1")
    await redis.config_set("maxmemory", 2**20)
    told = "Redis is at its maxmemory of 1 MiB: nothing is requeued; redrive it when groups in flight have ended"
    with pytest.raises(RedisFullError, match=told):
        await pipeline.redriven(letter)
    attempts = await redrive_all(redis, pipeline.keys, pipeline.event_log)
    assert [item.redriven for item in attempts] == [None, None]
    assert all(item.reason.startswith(told) and item.reason.endswith("(2 groups are left)") for item in attempts)
    assert await pipeline.counts() == {"dispatched": 2, "dead": 2}
    assert await pipeline.event_log.events() == []
    await redis.config_set("maxmemory", 0)
    assert (await pipeline.redriven(letter)).redriven == "g0-r1"
    assert await pipeline.counts() == {"dispatched": 3, "dead": 2, "pending": 1}


async def test_pending_redriven_groups_stay_within_the_memory_bound(pipeline):
    redis, keys = pipeline.redis, pipeline.keys
    groups = [f"g{number:02}" for number in range(REDRIVEN_PENDING + 3)]
    for group in groups:
        await pipeline.dead_task(group)
    nameless = await given_up(pipeline, pipeline.lane.verdicts, "{", group=None)
    attempts = await redrive_all(redis, keys, pipeline.event_log)
    assert [item.entry for item in attempts] == [item.entry for item in await letters(redis, keys)], "in their order"
    assert [item.redriven for item in attempts] == [f"{group}-r1" for group in groups[:-3]] + [None] * 4
    told = f"{REDRIVEN_PENDING} redriven groups are pending, the most at once; redrive it when some"
    for item in attempts[-4:-1]:
        assert item.reason.startswith(told)
        assert item.reason.endswith("(3 groups are left)")
    assert "it names no group" in attempts[-1].reason, "that no room would help"
    assert await pipeline.counts() == {
        "dispatched": 2 * len(groups) - 3,
        "dead": len(groups),
        "pending": REDRIVEN_PENDING,
    }
    last = (await letters(redis, keys))[-2]
    assert told in await pipeline.refused(last)

    await pipeline.transitions.release(Lane.TRAIN, "g00-r1", Release.STALE, SAMPLES)
    await pipeline.dispatch("other")
    attempts = await redrive_all(redis, keys, pipeline.event_log)
    assert [item.redriven for item in attempts] == [f"{groups[-3]}-r1", None, None, None], "others take no such place"
    assert attempts[1].reason.endswith("(2 groups are left)")
    assert attempts[-1].entry == nameless.entry


async def test_obsolete_names_of_redriven_groups_are_deleted(pipeline, monkeypatch):
    monkeypatch.setattr(dead_letters, "REDRIVEN_KEPT", 3)
    redis, keys = pipeline.redis, pipeline.keys

    async def drawn_again(group):
        letter = await pipeline.dead_task(group)
        assert (await pipeline.redriven(letter)).redriven == f"{group}-r1"
        await pipeline.rollout.read(1, 1)
        await asyncio.sleep(0.002)
        return letter

    async def known():
        return {name.decode() for name in await redis.hkeys(keys.redriven)}

    await drawn_again("g0")
    first = await drawn_again("g1")
    await drawn_again("g2")
    await drawn_again("g3")
    assert await known() == {"g0", "g1", "g2", "g3"}, "a letter may still ask for each"
    await redis.xtrim(keys.dead, minid=first.entry, approximate=False)
    await drawn_again("g4")
    assert await known() == {"g0", "g1", "g2", "g3", "g4"}, "g0 has no letter, but is pending again"
    await pipeline.transitions.release(Lane.TRAIN, "g0-r1", Release.STALE, SAMPLES)
    await drawn_again("g5")
    assert await known() == {"g1", "g2", "g3", "g4", "g5"}
    assert [item.redriven for item in await letters(redis, keys)] == [f"g{number}-r1" for number in range(1, 6)]
