"""Leases that a consumer takes over, on a real server: what happens between its commands decides what it hands out."""

import asyncio
from dataclasses import replace

import pytest

from services.contracts import Lane, Task
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.leases import renew_lease, restart_leases
from services.streams.keys import RunKeys
from tests.services.driven import STATE, DrivenRun, set_clock_back, task_of

LEASE_S = 30.0


class Interrupted:
    """A connection on which others act as soon as a consumer has claimed entries; it records the commands sent."""

    def __init__(self, redis, act):
        self._redis = redis
        self._act = act
        self.sent = []

    def __getattr__(self, name):
        self.sent.append(name)
        return getattr(self._redis, name)

    async def xautoclaim(self, *args):
        reply = await self._redis.xautoclaim(*args)
        await self._act()
        return reply


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


@pytest.fixture
async def run(redis, keys):
    return await DrivenRun.open(redis, keys, LEASE_S)


async def lapsed(run, *groups):
    """The leases of `groups`, which replica r0 let lapse."""
    await run.sampler.dispatch(Lane.TRAIN, [task_of(group) for group in groups], STATE)
    deliveries = await run.rollout("r0").read(len(groups), 1)
    for delivery in deliveries:
        await run.lapse(delivery.lease)
    return [delivery.lease for delivery in deliveries]


def reader(redis, keys, name="r1"):
    return Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", name, Task, LEASE_S, 2)


async def test_a_claimed_entry_that_has_a_new_owner_is_not_handed_out(run, redis, keys):
    acked, taken, left, _ = await lapsed(run, "g0", "g1", "g2", "g3")

    async def act():
        await redis.xack(acked.stream, acked.consumer_group, acked.entry)
        await redis.xclaim(taken.stream, taken.consumer_group, "r2", 0, [taken.entry])

    interrupted = Interrupted(redis, act)
    deliveries = await reader(interrupted, keys).read(4, 0.01)
    assert [(delivery.message.group, delivery.deliveries) for delivery in deliveries] == [("g2", 2), ("g3", 2)]
    assert deliveries[0].lease.entry == left.entry
    looked, *sent = interrupted.sent
    assert looked == "xpending_range", "it looks for returned entries first"
    assert sent == ["pipeline"], "the delivery counts of all entries are one round trip"
    [lease] = await redis.xpending_range(taken.stream, "rollout", taken.entry, taken.entry, 1)
    assert lease["consumer"] == b"r2"


async def test_a_rewind_while_entries_are_claimed_hands_out_nothing(run, redis, keys):
    await lapsed(run, "g0")

    async def act():
        await redis.unlink(keys.lane(Lane.TRAIN).tasks)

    assert await reader(Interrupted(redis, act), keys).read(1, 0.01) == []
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g1")], STATE)
    [delivery] = await reader(redis, keys).read(1, 1)
    assert delivery.message.group == "g1"


async def test_a_lease_from_the_future_is_restarted(redis, keys):
    """The server's clock was set back by an hour: a dead consumer's leases lapse as usual, a live one keeps its own."""
    run = await DrivenRun.open(redis, keys, 0.3)
    await run.sampler.dispatch(Lane.TRAIN, [task_of(group) for group in ("g0", "g1", "g2")], STATE)
    dead, live, normal = await run.rollout("r0").read(3, 1)
    await redis.xclaim(live.lease.stream, "rollout", "r2", 0, [live.lease.entry])
    renewed = replace(live.lease, consumer="r2")
    await set_clock_back(redis, live.lease.stream, 3600)
    await renew_lease(redis, normal.lease)
    await asyncio.sleep(0.4)
    assert [each.message.group for each in await run.rollout("r1").read(3, 0.01)] == ["g2"]
    await asyncio.gather(*(restart_leases(redis, live.lease.stream, "rollout") for _ in range(3)))
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert await renew_lease(redis, renewed)
    [delivery] = await run.rollout("r3").read(1, 0.01)
    assert (delivery.message.group, delivery.deliveries) == ("g0", 2)
    assert not await renew_lease(redis, dead.lease)


async def test_leases_of_a_stream_without_readers_are_none(redis, keys):
    await restart_leases(redis, keys.lane(Lane.TRAIN).tasks, "rollout")
