"""Trimming on a real server: it deletes what the consumer group has acked, and nothing else."""

import asyncio
import json

import pytest

from services.contracts import Lane
from services.streams.delivery import consumer
from services.streams.delivery.consumer import tail, trim
from services.streams.keys import RunKeys
from tests.services.driven import STATE, DrivenRun, contents, task_of

GONE_S = 3600.0
LONG = 10_000


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys)


async def send(run, count):
    """Dispatch new groups; their numbers continue."""
    first = int(await run.redis.hget(run.streams.counters, "dispatched") or 0)
    for number in range(first, first + count):
        assert await run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], STATE)


async def length(run):
    return await run.redis.xlen(run.streams.tasks)


async def cut(run, gone_after_s=GONE_S, longest=LONG):
    return await trim(run.redis, run.streams.tasks, "rollout", gone_after_s, longest)


async def acked(run, count, *held):
    """New groups with acked tasks, except those at the places in `held`, whose leases are returned."""
    await send(run, count)
    deliveries = await run.rollout().read(count, 0.01)
    assert len(deliveries) == count
    for number, delivery in enumerate(deliveries):
        if number not in held:
            await run.rollout().ack(delivery.lease)
    return [deliveries[number].lease for number in held]


async def left(run):
    """The groups whose tasks are still on the stream."""
    entries = await run.redis.xrange(run.streams.tasks)
    return [json.loads(fields[b"m"])["group"] for _, fields in entries]


async def test_undelivered_entries_stay(run, redis, keys):
    await send(run, 5)
    before = await contents(redis, keys)
    assert await cut(run) == 0
    assert await contents(redis, keys) == before
    assert len(await run.rollout().read(5, 0.01)) == 5


async def test_a_long_stream_is_trimmed_in_several_calls(run, monkeypatch):
    monkeypatch.setattr(consumer, "TRIMMED_BEFORE", 200)
    monkeypatch.setattr(consumer, "TRIMMED_AT_ONCE", 200)
    stream, group = run.streams.tasks, "rollout"
    added = [await run.redis.xadd(stream, {"m": "m"}) for _ in range(1050)]
    await run.redis.xreadgroup(group, "r0", {stream: ">"}, count=2000)
    await run.redis.xack(stream, group, *added[:1020])
    with monkeypatch.context() as patched:
        patched.setattr(consumer, "TRIM_CALLS", 1)
        assert await cut(run) == 200
    assert await cut(run) == 820
    assert await length(run) == 30


async def test_short_stream_loses_only_entries_before_the_oldest_lease(run):
    await send(run, 6)
    held = await run.rollout().read(5, 0.01)
    for number in (0, 1, 3):
        await run.rollout().ack(held[number].lease)
    assert await cut(run) == 2
    assert await length(run) == 4
    await run.lapse(held[2].lease)
    await run.lapse(held[4].lease)
    again = await run.rollout("r1").read(5, 0.01) + await run.rollout("r1").read(5, 0.01)
    assert sorted(delivery.message.group for delivery in again) == ["g2", "g4", "g5"], "no message was lost"


async def test_long_stream_loses_oldest_acked_entries_behind_the_lease(run):
    held = await acked(run, 10, 1, 4, 7)
    await send(run, 2)
    assert await cut(run, longest=8) == 4
    assert await left(run) == ["g1", "g4", "g6", "g7", "g8", "g9", "g10", "g11"], "g0, g2, g3 and g5 are deleted"
    assert await cut(run, longest=8) == 0
    assert await cut(run, longest=0) == 2
    assert await left(run) == ["g1", "g4", "g7", "g9", "g10", "g11"], "g9 was delivered last"
    for lease in held:
        await run.lapse(lease)
    again = await run.rollout("r1").read(5, 0.01) + await run.rollout("r1").read(5, 0.01)
    assert sorted(delivery.message.group for delivery in again) == ["g1", "g10", "g11", "g4", "g7"], (
        "no message was lost"
    )


async def test_stream_above_its_limit_keeps_all_unacked_entries(run):
    await acked(run, 300, *range(0, 300, 2))
    assert await cut(run, longest=20) == 149
    assert await left(run) == [*(f"g{number}" for number in range(0, 300, 2)), "g299"]


async def test_trim_is_limited_per_call_and_continues(run, monkeypatch):
    monkeypatch.setattr(consumer, "TRIMMED_AT_ONCE", 30)
    monkeypatch.setattr(consumer, "TRIM_CALLS", 4)
    await acked(run, 302, 0, 150)
    assert await cut(run, longest=0) == 120
    assert (await left(run))[:2] == ["g0", "g121"]
    assert await cut(run, longest=0) == 120
    assert (await left(run))[:3] == ["g0", "g150", "g242"]
    assert await cut(run, longest=0) == 59
    assert await left(run) == ["g0", "g150", "g301"]


async def test_leases_on_deleted_entries_hide_no_others(run, redis):
    """A page of entries may hold more leases than entries."""
    held = await acked(run, 400, *range(350), 380)
    for lease in held[1:340]:
        await redis.xdel(run.streams.tasks, lease.entry)
    await cut(run, longest=0)
    assert await left(run) == ["g0", *(f"g{number}" for number in range(340, 350)), "g380", "g399"]


async def test_tailing_reader_sees_all_entries_despite_a_long_lease(run, redis):
    """A reader that is behind by at most the limit misses no entry."""
    seen, after = [], "0-0"
    await acked(run, 1, 0)
    for _ in range(20):
        await acked(run, 5)
        await cut(run, longest=6)
        assert await length(run) == 6
        entries = await tail(redis, run.streams.tasks, after)
        after = entries[-1][0]
        seen += [json.loads(body)["group"] for _, body in entries]
    assert seen == [f"g{number}" for number in range(101)]


async def test_the_last_delivered_entry_stays_until_a_later_delivery(run):
    await send(run, 3)
    for delivery in await run.rollout().read(3, 0.01):
        await run.rollout().ack(delivery.lease)
    assert await cut(run) == 2
    assert await cut(run) == 0
    await send(run, 1)
    [delivery] = await run.rollout().read(3, 0.01)
    await run.rollout().ack(delivery.lease)
    assert await cut(run) == 1
    assert await length(run) == 1, "at most one acked entry stays"


async def test_a_lease_that_lapsed_and_was_taken_over_is_kept(run):
    await send(run, 2)
    first, second = await run.rollout().read(2, 0.01)
    await run.lapse(first.lease)
    [taken] = await run.rollout("r1").read(1, 0.01)
    await run.rollout().ack(second.lease)
    assert await cut(run) == 0
    await run.rollout("r1").ack(taken.lease)
    assert await cut(run) == 1


async def test_gone_consumers_are_deleted_unless_they_hold_a_lease(run, redis):
    await send(run, 2)
    [held] = await run.rollout("holder").read(1, 0.01)
    [done] = await run.rollout("idler").read(1, 0.01)
    await run.rollout("idler").ack(done.lease)

    async def known():
        return {consumer["name"].decode() for consumer in await redis.xinfo_consumers(run.streams.tasks, "rollout")}

    await cut(run)
    assert await known() == {"holder", "idler"}
    await asyncio.sleep(0.02)
    await cut(run, gone_after_s=0.01)
    assert await known() == {"holder"}
    assert (await redis.xpending(run.streams.tasks, "rollout"))["pending"] == 1
    await send(run, 1)
    assert [delivery.message.group for delivery in await run.rollout("idler").read(1, 0.01)] == ["g2"], (
        "a deleted consumer may come back"
    )
    await run.lapse(held.lease)
    assert [delivery.message.group for delivery in await run.rollout("idler").read(1, 0.01)] == ["g0"]


async def test_missing_or_shared_stream_is_not_trimmed(run, redis, keys):
    assert await trim(redis, keys.lane(Lane.EVALUATION).tasks, "rollout", GONE_S, 0) == 0
    await redis.xadd(keys.lane(Lane.EVALUATION).samples, {"m": "x"})
    assert await trim(redis, keys.lane(Lane.EVALUATION).samples, "verifier", GONE_S, 0) == 0
    await send(run, 2)
    for delivery in await run.rollout().read(2, 0.01):
        await run.rollout().ack(delivery.lease)
    assert await trim(redis, run.streams.tasks, "verifier", GONE_S, 0) == 0
    for name in ("another", "zzz"):
        await redis.xgroup_create(run.streams.tasks, name, id="0")
        assert await cut(run, longest=0) == 0, "a second group has not read the entries"
        await redis.xgroup_destroy(run.streams.tasks, name)
    assert await cut(run) == 1
