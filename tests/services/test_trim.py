"""Trimming on a real server: what the consumer group is done with goes, and nothing else does."""

import asyncio

import pytest

from services.contracts import Lane
from services.streams.keys import RunKeys
from services.streams.leases import trim
from tests.services.driven import STATE, DrivenRun, contents, task_of

GONE_S = 3600.0


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys)


async def send(run, count):
    """New groups; the names run on."""
    first = int(await run.redis.hget(run.streams.counters, "dispatched") or 0)
    for number in range(first, first + count):
        assert await run.sampler.dispatch(Lane.TRAIN, task_of(f"g{number}"), STATE)


async def there(run):
    return await run.redis.xlen(run.streams.tasks)


async def cut(run, gone_after_s=GONE_S):
    return await trim(run.redis, run.streams.tasks, "rollout", gone_after_s)


async def test_what_nobody_was_given_yet_stays(run, redis, keys):
    await send(run, 5)
    before = await contents(redis, keys)
    assert await cut(run) == 0
    assert await contents(redis, keys) == before
    assert len(await run.rollout().read(5, 0.01)) == 5


async def test_everything_before_the_oldest_lease_goes_and_nothing_behind_it(run):
    await send(run, 6)
    held = await run.rollout().read(5, 0.01)
    for number in (0, 1, 3):
        await run.rollout().ack(held[number].lease)
    assert await cut(run) == 2
    assert await there(run) == 4
    await run.lapse(held[2].lease)
    await run.lapse(held[4].lease)
    again = await run.rollout("r1").read(5, 0.01) + await run.rollout("r1").read(5, 0.01)
    assert sorted(one.message.group for one in again) == ["g2", "g4", "g5"], "no message was lost"


async def test_the_last_delivered_entry_goes_once_another_is_behind_it(run):
    await send(run, 3)
    for one in await run.rollout().read(3, 0.01):
        await run.rollout().ack(one.lease)
    assert await cut(run) == 2
    assert await cut(run) == 0
    await send(run, 1)
    [one] = await run.rollout().read(3, 0.01)
    await run.rollout().ack(one.lease)
    assert await cut(run) == 1
    assert await there(run) == 1, "a stream never holds more than one entry that is done with"


async def test_a_lease_that_lapsed_and_was_taken_over_is_kept(run):
    await send(run, 2)
    first, second = await run.rollout().read(2, 0.01)
    await run.lapse(first.lease)
    [taken] = await run.rollout("r1").read(1, 0.01)
    await run.rollout().ack(second.lease)
    assert await cut(run) == 0
    await run.rollout("r1").ack(taken.lease)
    assert await cut(run) == 1


async def test_consumers_long_gone_are_forgotten_unless_they_hold_a_lease(run, redis):
    await send(run, 2)
    [held] = await run.rollout("holder").read(1, 0.01)
    [done] = await run.rollout("idler").read(1, 0.01)
    await run.rollout("idler").ack(done.lease)

    async def known():
        return {one["name"].decode() for one in await redis.xinfo_consumers(run.streams.tasks, "rollout")}

    await cut(run)
    assert await known() == {"holder", "idler"}
    await asyncio.sleep(0.02)
    await cut(run, gone_after_s=0.01)
    assert await known() == {"holder"}
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 1
    await send(run, 1)
    assert [one.message.group for one in await run.rollout("idler").read(1, 0.01)] == ["g2"], "it may come back"
    await run.lapse(held.lease)
    assert [one.message.group for one in await run.rollout("idler").read(1, 0.01)] == ["g0"]


async def test_a_stream_that_is_not_there_or_is_read_by_others_is_left_alone(run, redis, keys):
    assert await trim(redis, keys.lane(Lane.EVALUATION).tasks, "rollout", GONE_S) == 0
    await redis.xadd(keys.lane(Lane.EVALUATION).samples, {"m": "x"})
    assert await trim(redis, keys.lane(Lane.EVALUATION).samples, "verifier", GONE_S) == 0
    await send(run, 2)
    for one in await run.rollout().read(2, 0.01):
        await run.rollout().ack(one.lease)
    assert await trim(redis, run.streams.tasks, "verifier", GONE_S) == 0
    for name in ("another", "zzz"):
        await redis.xgroup_create(run.streams.tasks, name, id="0")
        assert await cut(run) == 0, "a second group has not read it"
        await redis.xgroup_destroy(run.streams.tasks, name)
    assert await cut(run) == 1
