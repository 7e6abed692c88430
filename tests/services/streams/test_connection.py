"""A Redis that is killed, restarted, slow or cut off: real servers, and a proxy between them and the client."""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import WatchError

from deploy.local.valkey import EmbeddedValkey, server_binary
from services.contracts import Fence
from services.streams.connection.client import (
    RECONNECT_S,
    RedisOutageError,
    RedisUnavailableError,
    client,
    connect,
    connection_problem,
    server_id,
)
from services.streams.connection.functions import load
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner
from tests.harness.free_ports import free_port
from tests.harness.servers.proxy import Proxy
from tests.harness.servers.redis_servers import start_server
from tests.services.streams.repeating import repeat, until_a_read_blocks

LIBRARY = """#!lua name=counting
redis.register_function('count', function(keys, args) return redis.call('INCR', keys[1]) end)"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server, to which this process logs in with the file of its password."""
    valkey = EmbeddedValkey(tmp_path / "valkey")
    try:
        valkey.start()
        for name, value in valkey.login.items():
            monkeypatch.setenv(name, value)
        yield valkey
    finally:
        valkey.stop()
        valkey.close()


@pytest.fixture
async def direct(server):
    """A client of the server, without a proxy between them."""
    redis = await connect(server.url)
    yield redis
    await redis.aclose()


async def kill_and_restart(server, after_s=0.7):
    """`kill -9`, and a later start on the same data; returns when it answered again (monotonic seconds)."""
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.sleep(after_s)
    await asyncio.to_thread(server.restart)
    return time.monotonic()


def port_of(server):
    return server.port


async def test_every_kind_of_call_survives_kill_and_restart(server, direct):
    script = direct.register_script("return redis.call('INCR', KEYS[1])")
    await direct.function_load(LIBRARY)

    async def pipeline(transaction):
        async with direct.pipeline(transaction=transaction) as pipe:
            pipe.incr(f"pipeline-{transaction}")
            pipe.get(f"pipeline-{transaction}")
            first, second = await pipe.execute()
            assert first == int(second)

    calls = {
        "command": lambda: direct.incr("command"),
        "script": lambda: script(keys=["script"]),  # the server forgets scripts: EVALSHA must fall back
        "function": lambda: direct.fcall("count", 1, "function"),  # functions are data, and kept
        "pipeline-True": lambda: pipeline(True),
        "pipeline-False": lambda: pipeline(False),
    }
    over = asyncio.Event()
    tasks = {name: asyncio.create_task(repeat(command, over)) for name, command in calls.items()}
    await asyncio.sleep(0.3)
    for _ in range(2):
        await kill_and_restart(server)
        await asyncio.sleep(0.5)
    over.set()
    for name, task in tasks.items():
        count, longest = await task
        stored = int(await direct.get(name))
        assert longest > 0.5, f"{name} was not in flight when the server was unavailable"
        # A call whose reply was lost may have run twice; no call is lost.
        assert count <= stored <= count + 2, name


async def test_a_blocked_read_continues_after_a_restart(server, direct):
    await direct.xgroup_create("stream", "group", id="0", mkstream=True)
    read = asyncio.create_task(direct.xreadgroup("group", "reader", {"stream": ">"}, count=1, block=10_000))
    await asyncio.sleep(0.2)
    restarted = await kill_and_restart(server)
    await direct.xadd("stream", {"m": "news"})
    [[_, [(_, fields)]]] = await read
    assert fields == {b"m": b"news"}
    print(f"commands work {time.monotonic() - restarted:.2f} s after the server does")


async def test_many_tasks_wait_at_once(server, direct):
    over = asyncio.Event()
    tasks = [asyncio.create_task(repeat(lambda i=i: direct.incr(f"counter-{i}"), over)) for i in range(200)]
    await asyncio.sleep(0.3)
    restarted = await kill_and_restart(server)
    await asyncio.gather(*(direct.incr(f"late-{i}") for i in range(200)))
    assert time.monotonic() - restarted < RECONNECT_S / 2
    over.set()
    assert all(longest > 0.5 for _, longest in await asyncio.gather(*tasks))


async def test_commands_wait_for_a_server_that_loads_its_file(server, direct, tmp_path):
    async with direct.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.set(f"key-{number}", number)
        await pipe.execute()
    server.stop()
    command = [
        server_binary(),
        "--port",
        str(port_of(server)),
        "--dir",
        tmp_path / "valkey",
        "--appendonly",
        "yes",
        "--save",
        "",
        "--bind",
        "127.0.0.1",
        "--key-load-delay",
        "500",
        "--logfile",
        "slow.log",
        "--requirepass",
        server.password_file.read_text(),
    ]
    slow = await asyncio.create_subprocess_exec(*map(str, command), stdout=subprocess.DEVNULL)
    try:
        assert await direct.get("key-2999") == b"2999"
    finally:
        slow.terminate()
        await slow.wait()
    assert "loading the dataset" in direct.get_retry().reason


async def test_a_lost_connection_fails_a_watched_transaction(server):
    async with Proxy("127.0.0.1", port_of(server)) as proxy:
        redis = client(f"redis://127.0.0.1:{proxy.port}/0")
        async with redis.pipeline(transaction=True) as pipe:
            await pipe.watch("key")
            assert await pipe.get("key") is None
            pipe.multi()
            pipe.set("key", 1)
            proxy.drop_all()
            with pytest.raises(WatchError):
                await pipe.execute()
        assert await redis.get("key") is None
        await redis.aclose()


async def test_dropped_refused_and_slow_connections(server):
    async with Proxy("127.0.0.1", port_of(server)) as proxy:
        redis = await connect(f"redis://127.0.0.1:{proxy.port}/0")
        over = asyncio.Event()
        tasks = [asyncio.create_task(repeat(lambda i=i: redis.incr(f"counter-{i}"), over)) for i in range(20)]
        dropped = 0
        for _ in range(100):  # on a busy machine, clients may not have reconnected yet
            await asyncio.sleep(0.2)
            dropped += bool(proxy.drop_all())
            if dropped == 5:
                break
        assert dropped == 5
        proxy.refuse(1.0)
        proxy.drop_all()
        await asyncio.sleep(1.2)
        proxy.delay(0.2)
        await asyncio.sleep(1.0)
        proxy.delay(0.0)
        over.set()
        results = await asyncio.gather(*tasks)
        assert all(longest > 0.8 for _, longest in results), "all waited while connections were refused"
        for number, (count, _) in enumerate(results):
            assert int(await redis.get(f"counter-{number}")) >= count
        assert proxy.accepted > 40
        await redis.aclose()


async def test_blocked_read_notices_a_silently_dead_connection(server, direct):
    async with Proxy("127.0.0.1", port_of(server)) as proxy:
        redis = client(f"redis://127.0.0.1:{proxy.port}/0", answer_s=5.0)
        await redis.xgroup_create("stream", "group", id="0", mkstream=True)
        began = time.monotonic()
        read = asyncio.create_task(redis.xreadgroup("group", "reader", {"stream": ">"}, count=1, block=4_500))
        await until_a_read_blocks(direct)  # not through the proxy, which would swallow a second connection too
        assert proxy.swallow() > 0
        # The entry goes to the read whose connection is dead; it stays pending until its lease is taken over.
        await redis.xadd("stream", {"m": "lost"})
        assert await read == []
        assert 4.9 < time.monotonic() - began < RECONNECT_S / 2
        assert (await redis.xpending("stream", "group"))["pending"] == 1
        await redis.aclose()


async def test_patience_ends_with_the_address_and_without_the_password(server, caplog):
    port = port_of(server)
    redis = client(f"redis://:secret@127.0.0.1:{port}/0", patience_s=3.0)
    server.stop()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "services.streams.connection.client"):
        errors = await asyncio.gather(*(redis.get("key") for _ in range(50)), return_exceptions=True)
    assert time.monotonic() - began > 2.9
    for error in errors:
        assert isinstance(error, RedisOutageError)
        assert isinstance(error, RedisUnavailableError)
        assert isinstance(error, RedisConnectionError)
        assert str(error).startswith(f"Redis at redis://127.0.0.1:{port}/0 has been unavailable for 3 s: ")
        assert str(error).count("has been unavailable") == 1, "nested retries"
        assert "secret" not in str(error) + repr(error)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1, "one line in a few seconds, however many commands wait"
    assert re.fullmatch(rf"Redis at redis://127.0.0.1:{port}/0 is unavailable: .+; retrying for another 3 s", lines[0])
    problem = await connection_problem(redis, 1.0)
    assert problem.startswith("no answer within 1 s: "), problem
    assert "refused" in problem or "connecting" in problem.lower()
    await redis.aclose()


async def test_connect_waits_for_a_server_that_comes_late(server):
    restart = asyncio.create_task(kill_and_restart(server, after_s=1.5))
    began = time.monotonic()
    redis = await connect(server.url)
    assert 1.0 < time.monotonic() - began < RECONNECT_S / 2
    assert await redis.ping()
    await restart
    await redis.aclose()


async def test_wrong_credentials_fail_connect_at_once(server):
    wrong = server.address.replace("//", "//:wrong@")
    # If it had waited, the error would be that the server cannot be reached within so many seconds.
    with pytest.raises(RedisUnavailableError, match=r"^Redis at redis://127\.0\.0\.1:\d+/0 rejected the credentials"):
        await connect(wrong)


async def test_commands_wait_for_a_server_that_cannot_save(server, direct, tmp_path, caplog):
    await load(direct)
    await direct.config_set("save", "3600 1")
    shutil.rmtree(tmp_path / "valkey")  # the server keeps its open files, but cannot write a snapshot
    await direct.bgsave()
    for _ in range(200):
        if (await direct.info("persistence"))["rdb_last_bgsave_status"] != "ok":
            break
        await asyncio.sleep(0.05)
    with caplog.at_level(logging.WARNING, "services.streams.connection.client"):
        writing = [
            asyncio.create_task(direct.set("key", "value")),
            asyncio.create_task(become_owner(direct, RunKeys("run"), "sampler", "s")),
        ]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in writing)
        await direct.config_set("stop-writes-on-bgsave-error", "no")
        assert await asyncio.wait_for(asyncio.gather(*writing), 60.0) == [True, Fence(1, "s")]
    assert any("is unavailable: MISCONF" in record.message for record in caplog.records)


async def test_silent_server_does_not_hold_connect_beyond_its_deadline():
    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError, match=rf"^Redis at redis://127\.0\.0\.1:{port}/0 cannot be reached"):
        await connect(f"redis://127.0.0.1:{port}/0", 8.0)
    assert time.monotonic() - began < 16.0, "connect waited for a second answer"
    silent.close()


async def test_a_cluster_is_rejected_and_eviction_is_warned_about(tmp_path, caplog):
    with (
        start_server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", free_port()) as cluster,
        start_server(tmp_path, "--maxmemory-policy", "allkeys-lru") as evicting,
    ):
        with pytest.raises(RedisUnavailableError, match="is part of a Redis Cluster, which is not supported"):
            await connect(f"redis://127.0.0.1:{cluster.port}/0")
        redis = await connect(f"redis://127.0.0.1:{evicting.port}/0")
        await redis.aclose()
        assert any("has the maxmemory-policy allkeys-lru and may evict" in record.message for record in caplog.records)


def test_servers_use_ports_below_those_of_clients(server):
    lowest = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert max(port_of(server), free_port()) < (int(lowest.read_text().split()[0]) if lowest.exists() else 32768)


async def test_a_deadline_that_ends_while_a_command_is_sent_counts(own_server, monkeypatch):
    """asyncio.wait_for, with which redis-py sends, loses such a cancellation; the command would wait for its answer."""
    redis = own_server[1]
    send, tasks = Connection._send_packed_command, []

    async def sent(self, command):
        await send(self, command)
        if b"lost" in b"".join(command):
            tasks[0].cancel()

    monkeypatch.setattr(Connection, "_send_packed_command", sent)
    tasks.append(asyncio.create_task(redis.get("lost")))
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await redis.set("found", "1")
    assert await redis.get("found") == b"1", "no later command gets the answer"


async def test_a_server_has_another_id_after_a_restart(tmp_path):
    with start_server(tmp_path) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        first = await server_id(url, 30)
        assert len(first) == 40
        assert await server_id(url, 30) == first
        server.stop()
        with pytest.raises(RedisUnavailableError):
            await server_id(url, 0.3)
        server.start()
        assert await server_id(url, 30) != first
