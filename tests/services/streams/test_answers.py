"""Every error of Redis that a server at work can give has an answer.

Those of a server that loads its file, or cannot save, are in test_connection.py.
"""

import asyncio
import logging
import signal
import time

import pytest
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from services.contracts import Lane
from services.streams.connection.answers import Answer, answer_to
from services.streams.connection.client import CONNECTIONS, RedisOutageError, client
from services.streams.connection.functions import REFUSING, RedisFullError, load
from services.streams.connection.pools import IDLE_S
from services.streams.delivery.leases import LeaseRenewal
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner
from services.streams.state.stats import stream_figures
from tests.harness.servers.redis_servers import start_server
from tests.services.driven import DrivenRun, task_of

SPIN = """#!lua name=spinning
redis.register_function('spin', function(keys, args) while true do redis.call('GET', keys[1]) end end)"""
BUSY_AFTER_MS = 100


@pytest.fixture
def redis(recorded):
    return recorded


async def until_busy(redis):
    """Return when the server says that a script keeps it busy."""
    answer = ""
    while not answer.startswith("BUSY "):
        await asyncio.sleep(0.02)
        try:
            await redis.ping()
        except redis_errors.ResponseError as error:
            answer = str(error)


async def until(holds):
    """Return once a coroutine function replies True; at the latest after 30 s."""
    async with asyncio.timeout(30):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


async def role_is(plain, role):
    return (await plain.info("replication"))["role"] == role


async def logged(caplog):
    return bool(caplog.records)


def in_pipelines(redis):
    """A write in a pipeline and in a transaction, as coroutines."""

    async def write(transaction):
        async with redis.pipeline(transaction=transaction) as pipe:
            pipe.ping().set(f"key-{transaction}", "value")
            return await pipe.execute()

    return [write(False), write(True)]


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
        figures = stream_figures(redis, {"{run}:tasks": "rollout"}, 1.0)
        work = [become_owner(redis, RunKeys("run"), "sampler"), redis.ping(), figures, *in_pipelines(redis)]
        calls = [asyncio.create_task(waiting) for waiting in work]
        await asyncio.wait(calls, timeout=0.5)
        assert not any(task.done() for task in calls)
        await killer.function_kill()
        await asyncio.wait_for(asyncio.gather(*calls), 30.0)
    assert any("is unavailable: BUSY" in record.message for record in caplog.records)
    with pytest.raises(redis_errors.ResponseError):
        await spinning
    await killer.aclose()


async def test_calls_wait_while_the_server_is_a_replica(redis, plain, tmp_path):
    await load(redis)
    (tmp_path / "primary").mkdir()
    with start_server(tmp_path / "primary") as primary:
        await plain.replicaof("127.0.0.1", primary.port)
        await until(lambda: role_is(plain, "slave"))
        work = [become_owner(redis, RunKeys("run"), "sampler"), redis.set("key", "value"), *in_pipelines(redis)]
        calls = [asyncio.create_task(waiting) for waiting in work]
        await asyncio.wait(calls, timeout=0.5)
        assert not any(task.done() for task in calls)
        await plain.replicaof("NO", "ONE")
        fence, *_ = await asyncio.wait_for(asyncio.gather(*calls), 30.0)
    assert fence.epoch == 1


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


async def test_functions_are_loaded_once_a_full_redis_has_room(redis, caplog):
    await load(redis)
    await redis.function_flush()
    await redis.config_set("maxmemory", 1)
    with caplog.at_level(logging.WARNING, "services.retry"):
        owning = asyncio.create_task(become_owner(redis, RunKeys("run"), "sampler"))
        await until(lambda: logged(caplog))
        assert not owning.done()
        await redis.config_set("maxmemory", 0)
        assert (await asyncio.wait_for(owning, 30.0)).epoch == 1
    assert "does not accept the functions of this release" in caplog.records[0].message


@pytest.mark.parametrize(("limit", "advice"), [(REFUSING, "enlarge the volume"), (100_000, "raise maxmemory")])
async def test_functions_that_never_fit_are_an_error(redis, monkeypatch, limit, advice):
    monkeypatch.setattr("services.streams.connection.functions.RECONNECT_S", 0.0)
    await redis.config_set("maxmemory", limit)
    with pytest.raises(RedisFullError, match=advice):
        await become_owner(redis, RunKeys("run"), "sampler")


async def test_leases_are_renewed_again_after_a_full_redis(redis, monkeypatch):
    monkeypatch.setattr("services.streams.connection.functions.RECONNECT_S", 0.0)
    run = await DrivenRun.open(redis, RunKeys("run"))
    lease = (await run.dispatched("g0")).lease

    async def idle(least_ms, most_ms):
        [found] = await redis.xpending_range(lease.stream, lease.consumer_group, "-", "+", 1)
        return least_ms <= found["time_since_delivered"] <= most_ms

    renewal = LeaseRenewal(redis, 0.3)
    with renewal.watching([lease], lambda lost: pytest.fail(f"{lost} was lost")):
        await redis.function_flush()
        await redis.config_set("maxmemory", 1)
        await until(lambda: idle(400, 10_000))
        await redis.config_set("maxmemory", 0)
        await until(lambda: idle(0, 200))


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


async def test_the_wait_for_a_connection_counts_for_its_command(server):
    redis = client(f"redis://127.0.0.1:{server.port}/0", patience_s=3.0, answer_s=0.5)
    pool = redis.connection_pool
    taken = [await pool.get_connection() for _ in range(CONNECTIONS)]
    started = time.monotonic()
    waiting = asyncio.create_task(redis.ping())
    await asyncio.sleep(2.5)
    server.process.send_signal(signal.SIGSTOP)
    try:
        for connection in taken:
            await pool.release(connection)
        with pytest.raises(RedisOutageError):
            await waiting
        # One more answer may be awaited when the time is over; with a limit of its own the command ends after 5.5 s.
        assert time.monotonic() - started < 5.4
    finally:
        server.process.send_signal(signal.SIGCONT)
    await redis.aclose()
