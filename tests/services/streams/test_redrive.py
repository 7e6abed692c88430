"""Limits of redrives, on a real server: nothing into a full Redis, few groups at once, old names are deleted."""

import asyncio

import pytest

from services.contracts import Lane, Release
from services.streams.connection.functions import RedisFullError
from services.streams.keys import RunKeys
from services.streams.retention import REDRIVEN_PENDING
from services.streams.state import dead_letters
from services.streams.state.dead_letters import letters, redrive_all
from tests.services.streams.hand_lane import SAMPLES, Pipeline, letter_of


@pytest.fixture
async def pipeline(redis, run_id):
    return await Pipeline(redis, RunKeys(run_id)).open()


async def test_a_full_redis_redrives_nothing_until_it_has_room(own_server, run_id):
    _, redis = own_server
    pipeline = await Pipeline(redis, RunKeys(run_id)).open()
    letter = await pipeline.dead_task("g0")
    await pipeline.dead_task("g1")
    await redis.config_set("maxmemory", 2**20)
    reason = "Redis is at its maxmemory of 1 MiB: nothing is requeued; redrive it when groups in flight have ended"
    with pytest.raises(RedisFullError, match=reason):
        await pipeline.redriven(letter)
    attempts = await redrive_all(redis, pipeline.keys, pipeline.event_log)
    assert [attempt.redriven for attempt in attempts] == [None, None]
    assert all(
        attempt.reason.startswith(reason) and attempt.reason.endswith("(2 groups are left)") for attempt in attempts
    )
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
    nameless = await letter_of(pipeline, pipeline.lane.verdicts, "{", group=None)
    attempts = await redrive_all(redis, keys, pipeline.event_log)
    assert [attempt.entry for attempt in attempts] == [letter.entry for letter in await letters(redis, keys)], (
        "in their order"
    )
    assert [attempt.redriven for attempt in attempts] == [f"{group}-r1" for group in groups[:-3]] + [None] * 4
    reason = f"{REDRIVEN_PENDING} redriven groups are pending, the most at once; redrive it when some"
    for attempt in attempts[-4:-1]:
        assert attempt.reason.startswith(reason)
        assert attempt.reason.endswith("(3 groups are left)")
    assert "it names no group" in attempts[-1].reason, "more room would not help this letter"
    assert await pipeline.counts() == {
        "dispatched": 2 * len(groups) - 3,
        "dead": len(groups),
        "pending": REDRIVEN_PENDING,
    }
    last = (await letters(redis, keys))[-2]
    assert reason in await pipeline.rejection(last)

    await pipeline.transitions.release(Lane.TRAIN, "g00-r1", Release.STALE, SAMPLES)
    await pipeline.dispatch("other")
    attempts = await redrive_all(redis, keys, pipeline.event_log)
    assert [attempt.redriven for attempt in attempts] == [f"{groups[-3]}-r1", None, None, None], (
        "the limit counts only redriven groups"
    )
    assert attempts[1].reason.endswith("(2 groups are left)")
    assert attempts[-1].entry == nameless.entry


async def test_obsolete_names_of_redriven_groups_are_deleted(pipeline, monkeypatch):
    monkeypatch.setattr(dead_letters, "REDRIVEN_KEPT", 3)
    redis, keys = pipeline.redis, pipeline.keys

    async def die_and_redrive(group):
        letter = await pipeline.dead_task(group)
        assert (await pipeline.redriven(letter)).redriven == f"{group}-r1"
        await pipeline.rollout.read(1, 1)
        await asyncio.sleep(0.002)
        return letter

    async def known():
        return {name.decode() for name in await redis.hkeys(keys.redriven)}

    await die_and_redrive("g0")
    first = await die_and_redrive("g1")
    await die_and_redrive("g2")
    await die_and_redrive("g3")
    assert await known() == {"g0", "g1", "g2", "g3"}, "each of them still has a letter"
    await redis.xtrim(keys.dead, minid=first.entry, approximate=False)
    await die_and_redrive("g4")
    assert await known() == {"g0", "g1", "g2", "g3", "g4"}, "g0 has no letter, but is pending again"
    await pipeline.transitions.release(Lane.TRAIN, "g0-r1", Release.STALE, SAMPLES)
    await die_and_redrive("g5")
    assert await known() == {"g1", "g2", "g3", "g4", "g5"}
    assert [letter.redriven for letter in await letters(redis, keys)] == [f"g{number}-r1" for number in range(1, 6)]
