"""The library of Redis functions: loaded once per version, fenced, repeatable, and usable when Redis is full."""

import asyncio
import re

import pytest
from redis.exceptions import ResponseError

from services.contracts import Cause, Lane, Release
from services.streams.connection import functions as function_library
from services.streams.connection.client import connect
from services.streams.connection.functions import FencedError, RedisFullError, library
from services.streams.delivery.leases import Lease
from services.streams.delivery.partials import NotKeptError
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.ownership import become_owner
from tests.services.driven import (
    STATE,
    DrivenRun,
    batch_of,
    contents,
    publish_verdict,
    record_of,
    record_verdict,
    sample_of,
    snapshot_at,
    task_of,
    verdict_on,
)
from tests.services.streams.function_cases import CASES

UNCHANGING = {"read_payloads", "read_together", "renew_lease"}
SINGLE = function_library.ALONE | function_library.READING
FENCED = sorted(name for name, case in CASES.items() if case.role)


class Watched:
    """A connection that records the called functions; with `repeat` it calls each twice, as if a reply was lost."""

    def __init__(self, redis):
        self._redis = redis
        self.called = []
        self.repeat = None
        self.between = {}
        self.after = {}

    def __getattr__(self, name):
        return getattr(self._redis, name)

    async def fcall(self, full_name, *rest):
        name = full_name.removeprefix(library().name + "_")
        self.called.append(name)
        reply = await self._redis.fcall(full_name, *rest)
        if self.repeat:
            self.between[name] = await contents(self._redis, self.repeat)
            reply = await self._redis.fcall(full_name, *rest)
            self.after[name] = await contents(self._redis, self.repeat)
        return reply


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


def sources():
    return function_library._sources()[1]


def test_every_function_has_a_case_here():
    assert set(CASES) == set(sources())


def test_every_function_that_asks_for_a_fence_has_one_here():
    always = {name for name, signature in library().signatures.items() if signature.is_fenced}
    if_given = {name for name, source in sources().items() if re.search(r"\bfenced\(", source)}
    assert if_given == {"change_record", "discard_entry"}, "the others are checked by the library"
    assert always | if_given == set(FENCED)
    assert {name for name, signature in library().signatures.items() if "fence" in signature.names} == set(FENCED)


async def ready(run, name):
    """The case's call, and what Redis holds before it."""
    call = await CASES[name].prepare(run)
    run.redis.called.clear()
    return call, await contents(run.redis, run.keys)


@pytest.mark.parametrize("name", FENCED)
async def test_a_previous_owner_is_rejected_and_changes_nothing(redis, keys, name):
    run = await DrivenRun.open(Watched(redis), keys)
    call, _ = await ready(run, name)
    await become_owner(redis, keys, CASES[name].role)
    before = await contents(redis, keys)
    with pytest.raises(FencedError, match=f"epoch:{CASES[name].role}"):
        await call()
    assert run.redis.called == [name]
    assert await contents(redis, keys) == before


@pytest.mark.parametrize("name", CASES)
async def test_a_call_whose_reply_was_lost_is_repeated_without_harm(redis, keys, name):
    run = await DrivenRun.open(Watched(redis), keys)
    call, before = await ready(run, name)
    run.redis.repeat = keys
    await call()
    assert run.redis.called[0] == name
    between, after = run.redis.between[name], run.redis.after[name]
    if name not in UNCHANGING:
        assert between != before, "the first call changes something"
    assert after == between


@pytest.mark.parametrize("name", sorted(CASES.keys() - SINGLE - {"delete_record", "unlink_closed"}))
async def test_a_repeated_command_of_several_calls_is_harmless(redis, keys, name):
    run = await DrivenRun.open(Watched(redis), keys)
    call, _ = await ready(run, name)
    run.redis.repeat = keys
    event_log = EventLog(run.redis, keys, "test")
    await asyncio.gather(event_log.write("before", ""), call(), event_log.write("after", ""))
    for repeated, after in run.redis.after.items():
        assert after == run.redis.between[repeated]
    phases = [event.phase for _, event in await event_log.events()]
    assert [phase for phase in phases if phase in ("before", "after")] == ["before", "after"]


@pytest.fixture
async def full(own_server, keys):
    """A run on a server of the test's own, and how to set its maxmemory (bytes; 0: none)."""
    _, client = own_server
    yield client, lambda limit: client.config_set("maxmemory", limit)
    await client.config_set("maxmemory", 0)


@pytest.mark.parametrize("name", CASES)
async def test_a_full_redis_rejects_only_calls_that_grow_it(full, keys, name):
    client, limit = full
    run = await DrivenRun.open(Watched(client), keys)
    call, before = await ready(run, name)
    await limit(1)
    if name in function_library.GROWING:
        with pytest.raises((RedisFullError, NotKeptError), match="maxmemory"):
            await call()
        assert await contents(client, keys) == before
        await limit(0)
    await call()
    assert name in run.redis.called
    if name not in UNCHANGING:
        assert await contents(client, keys) != before


async def test_run_drains_on_a_full_redis_with_replaced_processes(full, keys):
    client, limit = full
    run = await DrivenRun.open(client, keys)
    for group in ("g0", "g1"):
        await run.published(group)
    await run.lapse((await run.dispatched("g2")).lease)
    for entry in await client.xpending_range(run.streams.samples, "verifier", "-", "+", 10):
        await run.lapse(Lease(run.streams.samples, "verifier", "v0", entry["message_id"].decode()))
    await limit(1)
    run = await DrivenRun.open(client, keys, new=False)
    [again] = await run.rollout("r1").read(1, 0.01)
    with pytest.raises(RedisFullError):
        await run.publish(again.lease, sample_of(keys, "g2", 0))
    await run.rollout("r1").dead_letter(again, "test", Cause.DELIVERIES)
    assert await run.sampler.release(Lane.TRAIN, "g2", Release.DEAD, 2)
    for delivery in await run.verifier("v1").read(4, 0.01):
        assert await publish_verdict(run.transitions, Lane.TRAIN, delivery.lease, verdict_on(delivery.message))
    for delivery in await run.judge("s1").read(4, 0.01):
        verdict = delivery.message
        decision = "kept" if verdict.index else ""
        assert await record_verdict(run.sampler, Lane.TRAIN, delivery.lease, verdict, decision)
    assert await run.sampler.publish_batch(batch_of(keys, 1, ["g0", "g1"]), snapshot_at(1))
    [logged] = await run.learner.batches()
    version = await run.learner.announce(1, "w1", 1)
    assert await run.learner.commit_step(record_of(logged.batch, version), logged.entry)
    assert await run.learner.release_batch(logged)
    assert await run.counts() == {"dispatched": 3, "trained": 2, "dead": 1}
    assert await run.archived() == ["g2", "g0", "g1"]
    assert [key async for key in client.scan_iter(match=keys.key("payload:*"))] == []


def names(listed):
    """The libraries' names in a reply to FUNCTION LIST."""
    return [dict(zip(fields[::2], fields[1::2], strict=True))[b"library_name"].decode() for fields in listed]


async def test_library_is_loaded_once_per_code_and_again_after_a_flush(own_server, keys):
    server, client = own_server
    others = [await connect(f"redis://127.0.0.1:{server.port}/0") for _ in range(8)]
    try:
        assert names(await client.function_list()) == []
        fences = await asyncio.gather(*(become_owner(connection, keys, "sampler") for connection in [client, *others]))
        assert sorted(fence.epoch for fence in fences) == list(range(1, 10)), (
            "no call is lost among nine that find no library"
        )
        assert names(await client.function_list()) == [library().name]
        await client.function_flush()
        fences = await asyncio.gather(*(become_owner(connection, keys, "sampler") for connection in [client, *others]))
        assert sorted(fence.epoch for fence in fences) == list(range(10, 19))
        assert names(await client.function_list()) == [library().name]
    finally:
        for connection in others:
            await connection.aclose()


@pytest.fixture
def another_code(monkeypatch):
    """A function that gives the library another source: `changed(shared, functions)` of the current source."""
    original = function_library._sources

    def give(changed):
        shared, functions = original()
        monkeypatch.setattr(function_library, "_sources", lambda: changed(shared, dict(functions)))
        library.cache_clear()

    yield give
    monkeypatch.undo()
    library.cache_clear()


async def test_two_versions_of_the_code_coexist_in_a_rolling_upgrade(own_server, keys, another_code):
    _, client = own_server
    run = await DrivenRun.open(client, keys)
    await run.dispatched("g0")
    old = library().name
    another_code(
        lambda shared, functions: (shared, functions | {"dispatch": "-- the next release\n" + functions["dispatch"]})
    )
    assert library().name != old
    assert not await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE), "the new code finds the old code's group"
    assert await run.sampler.dispatch(Lane.TRAIN, [task_of("g1")], STATE)
    assert sorted(names(await client.function_list())) == sorted([old, library().name])
    sizes, group = (1, 1, 1, 1), keys.group("g2")
    arguments = (*await dispatch_keys(run), group, *sizes, run.sampler.fence.token, "", "g2", "{}", 2)
    assert await client.fcall(f"{old}_dispatch", 6, *arguments) == 1
    assert await run.counts() == {"dispatched": 3, "pending": 3}


async def dispatch_keys(run):
    keys, streams = run.keys, run.streams
    return keys.epoch("sampler"), streams.tasks, streams.counters, streams.pending, keys.sampler_state


async def test_flags_of_functions_are_part_of_the_code_s_version(monkeypatch, another_code):
    before = library().name
    monkeypatch.setattr(function_library, "GROWING", function_library.GROWING | {"release"})
    another_code(lambda shared, functions: (shared, functions))
    assert library().name != before


async def test_other_errors_are_not_reported_as_fence_or_full_redis(redis, keys):
    await redis.set(keys.lane(Lane.TRAIN).tasks, "not a stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await (await DrivenRun.open(redis, keys)).dispatched("g0")
