"""Calls of Redis functions that wait while another is in flight: sent together, each with its own reply and error."""

import asyncio
import time

import pytest
from redis import exceptions as redis_errors

from services.contracts import ProcessInfo
from services.streams.connection.client import connect
from services.streams.connection.functions import TOGETHER_APPENDING, call, call_for_each, load
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import LAPSES_S, Heartbeat
from tests.harness.servers.proxy import Proxy

RECORD = RunKeys("run").record


@pytest.fixture
def redis(recorded):
    return recorded


async def append(redis, stream, message="m"):
    return await call(redis, "append_message", record_key=RECORD, stream_key=stream, message=message, kept=0)


class Counted:
    """A client that records which function each command ran; `repeats`: as if the first reply was lost."""

    def __init__(self, redis, repeats=False):
        self._redis = redis
        self._repeats = repeats
        self.commands = []

    def __getattr__(self, name):
        return getattr(self._redis, name)

    async def fcall(self, name, *rest):
        self.commands.append(name.rpartition("_")[2])
        if self._repeats:
            await self._redis.fcall(name, *rest)
        return await self._redis.fcall(name, *rest)


async def test_calls_made_together_are_one_command_in_order(redis):
    counted = Counted(redis)
    await load(redis)
    messages = [f"message {number}" for number in range(TOGETHER_APPENDING - 1)]
    one = append(counted, "{run}:stream", "first")
    rest = [append(counted, "{run}:stream", text) for text in messages]
    await asyncio.gather(one, *rest)
    assert counted.commands == ["together"]
    stored = [fields[b"m"].decode() for _, fields in await redis.xrange("{run}:stream")]
    assert stored == ["first", *messages]


async def test_an_error_in_one_of_several_calls_is_its_own(redis):
    await redis.set("{run}:text", "no stream")
    keys = ("{run}:a", "{run}:text", "{run}:b")
    calls = [append(redis, key) for key in keys]
    first, wrong, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 1)
    assert isinstance(wrong, redis_errors.ResponseError)
    assert "WRONGTYPE" in str(wrong)
    assert await redis.xlen("{run}:a") == await redis.xlen("{run}:b") == 1


async def test_a_cancelled_caller_does_not_hold_the_others(redis, plain):
    await load(redis)
    await plain.client_pause(500, all=True)
    calls = [asyncio.create_task(append(redis, f"{{run}}:{number}")) for number in range(3)]
    await asyncio.sleep(0.05)
    calls[0].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [1, 1]


async def test_a_cancelled_caller_can_call_again_at_once(redis, plain):
    """What a service does when it is stopped: the cancelled task still hands back what it holds."""
    await load(redis)
    await plain.client_pause(500, all=True)

    async def work():
        try:
            await append(redis, "{run}:stream", "work")
        finally:
            await append(redis, "{run}:stream", "cleanup")

    working = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    working.cancel()
    await asyncio.wait([working], timeout=10)
    assert working.cancelled()
    stored = [fields[b"m"].decode() for _, fields in await redis.xrange("{run}:stream")]
    assert stored[-1] == "cleanup"


async def test_an_argument_that_cannot_be_sent_is_its_own_error(redis):
    messages = ("first", object(), "last")
    calls = [append(redis, "{run}:a", message) for message in messages]
    first, wrong, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 1)
    assert isinstance(wrong, redis_errors.DataError)


async def test_a_bug_reaches_every_caller(redis, monkeypatch):
    async def broken(*_):
        raise ZeroDivisionError

    await load(redis)
    monkeypatch.setattr("services.streams.connection.functions._fcall", broken)
    calls = [append(redis, "{run}:a") for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError] * 3


async def test_messages_of_a_repeated_command_are_appended_once(redis):
    await load(redis)
    event_log = EventLog(Counted(redis, repeats=True), RunKeys("run"), "test")
    await asyncio.gather(*(event_log.write("phase", f"event {number}") for number in range(100)))
    assert await redis.xlen(RunKeys("run").events) == 100


async def test_a_cancelled_call_that_waits_is_not_sent(redis, plain):
    await load(redis)
    await plain.client_pause(300, all=True)
    calls = [asyncio.create_task(append(redis, "{run}:stream", str(number))) for number in range(2)]
    await asyncio.sleep(0.05)
    late = asyncio.create_task(append(redis, "{run}:stream", "late"))
    await asyncio.sleep(0.05)
    late.cancel()
    assert await asyncio.gather(*calls) == [1, 1]
    assert await redis.xlen("{run}:stream") == 2


@pytest.mark.timeout(60)
async def test_a_dead_connection_does_not_silence_the_process(server, plain):
    async with Proxy("127.0.0.1", server.port) as proxy:
        redis = await connect(f"redis://127.0.0.1:{proxy.port}/0")
        await redis.hset(RECORD, "state", "running")
        await load(redis)
        info = ProcessInfo(id="v1", service="verifier", run="run", host="h", pid=1, metrics="h:9")
        async with Heartbeat(redis, info):
            held = proxy.swallow()
            assert held > 0
            stuck = asyncio.create_task(append(redis, "{run}:a"))
            worst, ends = 0.0, time.monotonic() + LAPSES_S + 4.0
            while time.monotonic() < ends:
                stored = await plain.hget(RunKeys("run").heartbeats, "v1")
                seconds, micros = await plain.time()
                worst = max(worst, seconds + micros / 1e6 - int(stored.split()[0]) / 1000)
                await asyncio.sleep(0.1)
            assert worst < LAPSES_S
            assert await stuck == 1
        await redis.aclose()


async def test_calls_with_many_keys_are_several_commands(redis):
    await load(redis)
    counted = Counted(redis)
    keys = [f"{{run}}:payload:{number}" for number in range(500)]
    values = {"payload_keys": keys, "field_list": ["text", "text_crc"]}
    await asyncio.gather(*(call_for_each(counted, "read_payloads", **values) for _ in range(16)))
    assert len(counted.commands) == 4, "4 MiB at 2,048 bytes per key are 2,048 keys"
