"""Every error of Redis that a server at work can give has an answer: each is caused on a real server."""

import asyncio
import logging

import pytest
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from services.contracts import Lane
from services.streams.connection.answers import Answer, answer_to
from services.streams.connection.client import CONNECTIONS, RedisOutageError, client, connect
from services.streams.connection.functions import RedisFullError, call, load
from services.streams.connection.pools import IDLE_S
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner
from tests.harness.servers.redis_servers import start_server
from tests.services.driven import DrivenRun, task_of

SPIN = """#!lua name=spinning
redis.register_function('spin', function(keys, args) while true do redis.call('GET', keys[1]) end end)"""
BUSY_AFTER_MS = 100


@pytest.fixture
def server(tmp_path):
    with start_server(tmp_path) as started:
        yield started


@pytest.fixture
async def redis(server):
    opened = await connect(f"redis://127.0.0.1:{server.port}/0")
    yield opened
    await opened.aclose()


@pytest.fixture
async def plain(server):
    """redis-py's own client, which retries nothing."""
    opened = Redis(port=server.port, retry=None)
    yield opened
    await opened.aclose()


async def until_busy(redis):
    """Return when the server says that a script keeps it busy."""
    answer = ""
    while not answer.startswith("BUSY "):
        await asyncio.sleep(0.02)
        try:
            await redis.ping()
        except redis_errors.ResponseError as error:
            answer = str(error)


async def clients_of(redis):
    return int((await redis.info("clients"))["connected_clients"])


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (redis_errors.ResponseError("BUSY Redis is busy running a script."), Answer.WAIT),
        (redis_errors.BusyLoadingError("Redis is loading the dataset in memory"), Answer.WAIT),
        (redis_errors.ResponseError("LOADING Redis is loading the dataset in memory"), Answer.WAIT),
        (redis_errors.ResponseError("MISCONF Errors writing to the AOF file"), Answer.WAIT),
        (redis_errors.ReadOnlyError("You can't write against a read only replica."), Answer.WAIT),
        (redis_errors.ResponseError("READONLY You can't write against a read only replica."), Answer.WAIT),
        (redis_errors.MaxConnectionsError("Too many connections"), Answer.WAIT),
        (redis_errors.ConnectionError("max number of clients reached"), Answer.WAIT),
        (redis_errors.NoScriptError("No matching script."), Answer.LOAD),
        (redis_errors.ResponseError("ERR Function not found"), Answer.LOAD),
        (redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), Answer.FULL),
        (redis_errors.ResponseError("OOM allow-oom flag is not set on the function"), Answer.FULL),
        (redis_errors.ResponseError("FENCED a newer owner holds epoch:sampler"), Answer.FENCED),
        (redis_errors.ResponseError("BUSYGROUP Consumer Group name already exists"), Answer.RAISE),
        (redis_errors.ResponseError("WRONGTYPE Operation against a key"), Answer.RAISE),
    ],
)
def test_each_error_has_its_answer(error, answer):
    assert answer_to(error) is answer


async def test_calls_wait_while_another_script_is_busy(redis, plain, caplog):
    await load(redis)
    await plain.function_load(SPIN)
    await plain.config_set("busy-reply-threshold", BUSY_AFTER_MS)
    spinning = asyncio.create_task(plain.fcall("spin", 1, "key"))
    killer = Redis(port=plain.connection_pool.connection_kwargs["port"], retry=None)
    with caplog.at_level(logging.WARNING, "services.streams.connection.client"):
        await until_busy(killer)
        calls = [asyncio.create_task(become_owner(redis, RunKeys("run"), "sampler")), asyncio.create_task(redis.ping())]
        await asyncio.wait(calls, timeout=0.5)
        assert not any(task.done() for task in calls)
        await killer.function_kill()
        await asyncio.wait_for(asyncio.gather(*calls), 30.0)
    assert any("is unavailable: BUSY" in record.message for record in caplog.records)
    with pytest.raises(redis_errors.ResponseError):
        await spinning
    await killer.aclose()


async def test_a_client_waits_while_the_server_has_its_most_clients(redis, plain):
    await redis.ping()
    limit = await clients_of(redis)
    await redis.config_set("maxclients", limit)
    other = client(f"redis://127.0.0.1:{plain.connection_pool.connection_kwargs['port']}/0")
    waiting = asyncio.create_task(other.ping())
    await asyncio.wait([waiting], timeout=1.0)
    assert not waiting.done()
    assert "max number of clients" in other.get_retry().reason
    await redis.config_set("maxclients", limit + 10)
    assert await asyncio.wait_for(waiting, 30.0)
    await other.aclose()


async def test_functions_that_a_server_lost_are_loaded_again(redis):
    keys = RunKeys("run")
    owned = await become_owner(redis, keys, "sampler")
    await redis.function_flush()
    many = [become_owner(redis, keys, role) for role in ("learner", "controller", "sampler")]
    assert len(await asyncio.gather(*many)) == 3
    assert await become_owner(redis, keys, "sampler") != owned


async def test_a_full_redis_is_reported_and_changes_nothing(redis):
    run = await DrivenRun.open(redis, RunKeys("run"))
    before = await redis.dbsize()
    await redis.config_set("maxmemory", 1)
    calls = [run.sampler.dispatch(Lane.TRAIN, [task_of(f"g{number}")], None) for number in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [RedisFullError] * 3
    await redis.config_set("maxmemory", 0)
    assert await redis.dbsize() == before


async def test_a_client_has_few_connections_and_closes_idle_ones(redis, plain, monkeypatch):
    before = await clients_of(plain)
    await asyncio.gather(*(redis.set(f"key-{number}", number) for number in range(2000)))
    await asyncio.gather(*(redis.xread({"none": "$"}, block=300) for _ in range(50)))
    assert await clients_of(plain) <= before + CONNECTIONS
    assert await clients_of(plain) > before + 2
    monkeypatch.setattr("services.streams.connection.pools.IDLE_S", 0.1)
    assert IDLE_S > 1
    await asyncio.sleep(0.2)
    await redis.ping()
    while await clients_of(plain) > before + 1:
        await asyncio.sleep(0.02)
        await redis.ping()


async def test_waiting_for_a_connection_ends_with_an_error(server):
    redis = client(f"redis://127.0.0.1:{server.port}/0", patience_s=0.5)
    reads = [asyncio.create_task(redis.xread({"none": "$"}, block=3000)) for _ in range(CONNECTIONS)]
    await asyncio.sleep(0.2)
    with pytest.raises(RedisOutageError, match=r"unavailable for 0\.5 s: all connections of this client were in use"):
        await redis.ping()
    await asyncio.gather(*reads)
    assert await redis.ping()
    await redis.aclose()


class Counted:
    """A client that records how many functions each command ran."""

    def __init__(self, redis):
        self._redis = redis
        self.commands = []

    def __getattr__(self, name):
        return getattr(self._redis, name)

    async def fcall(self, name, *rest):
        self.commands.append(name.rpartition("_")[2])
        return await self._redis.fcall(name, *rest)


async def test_calls_made_together_are_one_command_in_order(redis):
    counted = Counted(redis)
    await load(redis)
    messages = [f"message {number}" for number in range(100)]
    one = call(counted, "append_message", stream_key="{run}:stream", message="first", kept=0)
    rest = [call(counted, "append_message", stream_key="{run}:stream", message=text, kept=0) for text in messages]
    await asyncio.gather(one, *rest)
    assert counted.commands == ["together"]
    stored = [fields[b"m"].decode() for _, fields in await redis.xrange("{run}:stream")]
    assert stored == ["first", *messages]


async def test_an_error_in_one_of_several_calls_is_its_own(redis):
    await redis.set("{run}:text", "no stream")
    keys = ("{run}:a", "{run}:text", "{run}:b")
    calls = [call(redis, "append_message", stream_key=key, message="m", kept=0) for key in keys]
    first, wrong, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 1)
    assert isinstance(wrong, redis_errors.ResponseError)
    assert "WRONGTYPE" in str(wrong)
    assert await redis.xlen("{run}:a") == await redis.xlen("{run}:b") == 1


async def test_a_cancelled_caller_does_not_hold_the_others(redis, plain):
    await load(redis)
    await plain.client_pause(500, all=True)
    calls = [
        asyncio.create_task(call(redis, "append_message", stream_key=f"{{run}}:{number}", message="m", kept=0))
        for number in range(3)
    ]
    await asyncio.sleep(0.05)
    calls[0].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [1, 1]


async def test_a_cancelled_caller_can_call_again_at_once(redis, plain):
    """What a service does when it is stopped: the cancelled task still hands back what it holds."""
    await load(redis)
    await plain.client_pause(500, all=True)

    async def append(message):
        return await call(redis, "append_message", stream_key="{run}:stream", message=message, kept=0)

    async def work():
        try:
            await append("work")
        finally:
            await append("cleanup")

    working = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    working.cancel()
    await asyncio.wait([working], timeout=10)
    assert working.cancelled()
    stored = [fields[b"m"].decode() for _, fields in await redis.xrange("{run}:stream")]
    assert stored[-1] == "cleanup"
