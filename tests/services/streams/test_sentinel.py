"""A master that dies, hands over or comes back, with real Sentinels: commands go to the current master."""

import asyncio
import signal
import time

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.contracts import Fence
from services.streams.connection.client import RedisUnavailableError, client, connect, connection_problem
from services.streams.connection.credentials import SENTINEL_PASSWORD_FILE
from services.streams.connection.functions import FencedError, load
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner, newest_owner
from services.streams.state.policy_history import History
from tests.harness.servers.redis_servers import start_sentinel, start_server
from tests.harness.servers.watched_servers import SERVICE, in_sync, watched_servers
from tests.services.streams.repeating import repeat, until_a_read_blocks

pytestmark = pytest.mark.slow
DEATH_MS, HANDOVER_MS = 1500, 5000
"""After how long the Sentinels report a silent master as down: soon where it dies; else no short stall may count."""


@pytest.fixture
def watched(request, tmp_path):
    """A parameter: after how many milliseconds a silent master is down, then settings of the servers."""
    down_after_ms, *settings = getattr(request, "param", [DEATH_MS])
    with watched_servers(tmp_path, down_after_ms, *settings) as group:
        yield group


@pytest.fixture
async def redis(watched):
    connection = await connect(watched.url)
    yield connection
    await connection.aclose()


@pytest.mark.timeout(240)
async def test_what_a_replica_confirmed_survives_the_masters_death(watched, redis):
    """The test writes numbers, and WAIT on the same connection reports whether the replica has each of them."""
    confirmed = []

    async def write(number, wait_ms):
        async with redis.pipeline(transaction=False) as pipe:
            pipe.rpush("numbers", number)
            pipe.execute_command("WAIT", 1, wait_ms)
            _, replicas = await pipe.execute()
        if replicas:
            confirmed.append(number)

    over = asyncio.Event()
    counting = asyncio.create_task(repeat(lambda: redis.incr("counter"), over))
    for number in range(50):
        await write(number, 10_000)  # a replica may sync its file slowly
    blocked = asyncio.create_task(redis.xread({"entries": "$"}, block=14_000))
    await until_a_read_blocks(redis)
    watched.servers[0].kill()
    began = time.monotonic()
    for number in range(50, 100):
        # Unconfirmed, because the new master has no replica; the short WAIT keeps the read above open.
        await write(number, 50)
    took = time.monotonic() - began
    over.set()
    count, longest = await counting
    stored = [int(number) for number in await redis.lrange("numbers", 0, -1)]
    assert set(confirmed) >= set(range(50)), "the replica was in sync"
    assert set(confirmed) <= set(stored)
    assert set(range(50, 100)) <= set(stored), "the new master ran each command that returned without an error"
    assert longest > 0.5, "the command was in flight when the master died"
    assert int(await redis.get("counter")) >= count - 1, "only the write that the replica lacked may be lost"
    assert watched.servers[1].client().info("replication")["role"] == "master"
    await redis.xadd("entries", {"m": "new"})
    assert (await blocked)[0][1][0][1] == {b"m": b"new"}
    print(f"the first write on the new master came {took:.1f} s after the death of the old one")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("watched", [[HANDOVER_MS, "--min-replicas-to-write", "1"]], indirect=True)
async def test_failover_loses_nothing_if_the_master_needs_its_replica(watched, redis):
    await load(redis)
    keys = RunKeys("run")
    over = asyncio.Event()
    counters = [f"counter-{i}" for i in range(20)]
    calls = [asyncio.create_task(repeat(lambda name=name: redis.incr(name), over)) for name in counters]
    owners = asyncio.create_task(repeat(lambda: become_owner(redis, keys, "sampler"), over))
    await asyncio.sleep(0.3)
    watched.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", SERVICE)
    old, new = watched.servers
    await asyncio.to_thread(watched.until, lambda: in_sync(new, old), "the previous master has not become a replica")
    await asyncio.sleep(0.5)
    over.set()
    for name, (count, longest) in zip(counters, await asyncio.gather(*calls), strict=True):
        # One write may be lost, on its way to the replica when the link was cut: replication is asynchronous.
        assert int(await redis.get(name)) >= count - 1
        assert longest > 0.5, "the command waited while the new master had no replica"
    epochs, _ = await owners
    assert (await newest_owner(redis, keys, "sampler")).epoch >= epochs - 1
    assert await connection_problem(redis) is None


@pytest.mark.timeout(240)
async def test_two_owners_of_one_epoch_after_a_failover(watched, redis):
    """The master dies before its replica has the newest owner's epoch; another process then gets the same epoch."""
    await load(redis)
    keys = RunKeys("run")
    await become_owner(redis, keys, "learner")
    old, new = watched.servers
    await asyncio.to_thread(watched.until, lambda: new.client().exists(keys.epoch("learner")), "the replica is behind")
    new.process.send_signal(signal.SIGSTOP)  # and it must not find the next write in its socket either
    old.client().client_kill_filter(_type="replica")
    first = await History.fenced(redis, keys, "learner")
    old.kill()
    new.process.send_signal(signal.SIGCONT)
    second = await History.fenced(redis, keys, "learner")
    assert first.fence.epoch == second.fence.epoch == 2, "the failover did not lose the epoch"
    with pytest.raises(FencedError, match=second.fence.owner):
        await first.announce(0, "w0", 1)
    assert await second.announce(0, "w0", 1) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("watched", [[HANDOVER_MS]], indirect=True)
async def test_writes_leave_the_previous_master_before_its_demotion(watched, redis):
    """The Sentinels demote the previous master after some eight seconds, during which the test samples a counter."""
    old, new = watched.servers
    over = asyncio.Event()
    counting = asyncio.create_task(repeat(lambda: redis.incr("counter"), over))
    watched.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", SERVICE)
    await asyncio.to_thread(
        watched.until, lambda: watched.sentinels[0].client().sentinel_master(SERVICE)["port"] == new.port, "no failover"
    )
    counts = await asyncio.to_thread(counts_while_master, old, 90.0)
    assert counts[-1] == counts[len(counts) // 2], "the client wrote to the previous master until its demotion"
    over.set()
    await counting


def counts_while_master(server, deadline_s):
    """The values of a counter over time, until the Sentinels make the server a replica."""
    connection, counts, ends = server.client(), [], time.monotonic() + deadline_s
    while True:
        with connection.pipeline(transaction=True) as pipe:  # both values of the same moment
            count, (role, *_) = pipe.get("counter").execute_command("ROLE").execute()
        if role != "master":
            assert counts, "the server became a replica before the first sample"
            return counts
        assert time.monotonic() < ends, f"the server was still a master after {deadline_s:g} s"
        counts.append(count)
        time.sleep(0.1)


@pytest.mark.timeout(240)
async def test_new_client_finds_the_new_master_with_a_dead_sentinel(watched, redis):
    watched.sentinels[0].kill()
    watched.servers[0].kill()
    assert await redis.set("key", "value")
    late = await connect(watched.url)
    assert await late.get("key") == b"value"
    await late.aclose()
    watched.servers[0].start()  # the previous master returns as a master, until the Sentinels demote it
    assert await redis.set("key", "newer")
    await asyncio.to_thread(
        watched.until,
        lambda: in_sync(watched.servers[1], watched.servers[0]),
        "the previous master has not become a replica",
    )
    assert watched.servers[0].client().get("key") == "newer"


@pytest.mark.timeout(240)
async def test_many_connections_ask_the_sentinels_once(watched, redis):
    def connected():
        return sum(sentinel.client().info("stats")["total_connections_received"] for sentinel in watched.sentinels)

    before = connected()
    await asyncio.gather(*(redis.incr("counter") for _ in range(200)))
    assert connected() - before <= 10, "three connections are this test's, a few the Sentinels'"
    assert await redis.get("counter") == b"200"


@pytest.mark.timeout(240)
async def test_an_unknown_service_is_named(watched):
    with pytest.raises(RedisUnavailableError) as raised:
        await connect(watched.url.replace(f"/{SERVICE}/", "/other/"), 1.5)
    assert "cannot be reached within 1.5 s: No master found for 'other'" in str(raised.value)


@pytest.mark.timeout(240)
async def test_a_sentinel_s_address_in_place_of_a_server_s_is_named(watched):
    port = watched.sentinels[0].port
    with pytest.raises(RedisUnavailableError) as raised:
        await connect(f"redis://127.0.0.1:{port}/0", 3.0)
    assert f"Redis at redis://127.0.0.1:{port}/0 is a Sentinel: expected redis+sentinel://host:port," in str(
        raised.value
    )


@pytest.mark.timeout(240)
async def test_a_sentinel_asks_for_its_own_password(tmp_path, monkeypatch):
    file = tmp_path / "sentinel-password"
    file.write_text("s3cret\n")
    with (
        start_server(tmp_path) as server,
        start_sentinel(tmp_path, SERVICE, server.port, 1, "requirepass s3cret") as sentinel,
    ):
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/0"
        with pytest.raises(RedisUnavailableError) as raised:
            await connect(url, 1.5)
        assert f"Sentinel 127.0.0.1:{sentinel.port} - Authentication required" in str(raised.value)
        monkeypatch.setenv(SENTINEL_PASSWORD_FILE, str(file))
        redis = await connect(url, 5.0)
        assert await redis.ping()
        assert "s3cret" not in repr(redis.connection_pool.sentinel_manager.sentinels[0].connection_pool)
        await redis.aclose()


@pytest.mark.timeout(240)
async def test_commands_wait_for_the_replicas_of_a_master(tmp_path):
    with start_server(tmp_path) as server:
        redis = client(f"redis://127.0.0.1:{server.port}/0")
        await load(redis)
        server.client().config_set("min-replicas-to-write", 1)
        writing = [
            asyncio.create_task(redis.set("key", "value")),
            asyncio.create_task(become_owner(redis, RunKeys("run"), "sampler", "s")),
        ]
        await asyncio.sleep(0.7)
        assert not any(call.done() for call in writing)
        with start_server(tmp_path, "--replicaof", "127.0.0.1", server.port):
            assert await asyncio.wait_for(asyncio.gather(*writing), 20.0) == [True, Fence(1, "s")]
        await redis.aclose()


@pytest.mark.timeout(240)
async def test_patience_ends_when_no_sentinel_answers(watched):
    redis = client(watched.url, patience_s=2.0)
    for sentinel in watched.sentinels:
        sentinel.kill()
    with pytest.raises(
        RedisConnectionError, match=r"has been unavailable for 2 s: No master found for 'penstock' : Sentinel"
    ):
        await redis.ping()
    await redis.aclose()
