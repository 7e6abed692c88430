"""Heartbeats are read in one call, and lapse by the clock of Redis, whatever the clocks of the processes show."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.contracts import ProcessInfo
from services.streams.keys import RunKeys
from services.streams.state import heartbeat as heartbeat_module
from services.streams.state.heartbeat import (
    FORGOTTEN_S,
    LAPSES_S,
    SHARED_HEARTBEATS,
    Heartbeat,
    held_version,
    live_by_run,
    live_processes,
    surviving_processes,
)
from tests.services.driven import set_back


def info_of(run, name="rollout-1", **fields):
    return ProcessInfo(id=name, service=name.split("-")[0], run=run, host="h", pid=1, metrics="h:9", **fields)


async def live(redis, run):
    return [process.id for process in await live_processes(redis, run)]


@pytest.fixture
def silent(monkeypatch):
    """Heartbeats are sent only when the test asks for one."""
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 3600.0)


async def test_one_look_at_200_processes_is_two_commands(own_server, run_id, silent):
    _, redis = own_server
    async with AsyncExitStack() as stack:
        for number in range(200):
            info = info_of(run_id, f"rollout-{number:03d}", started_at=float(200 - number))
            await stack.enter_async_context(Heartbeat(redis, info))
        await redis.config_resetstat()
        connections = (await redis.info("clients"))["connected_clients"]
        found = await live_processes(redis, run_id)
        calls = {name: about["calls"] for name, about in (await redis.info("commandstats")).items()}
        own = {"cmdstat_config|resetstat", "cmdstat_info", "cmdstat_ping"}
        assert {name: count for name, count in calls.items() if name not in own} == {
            "cmdstat_hgetall": 1,
            "cmdstat_time": 1,
        }
        assert (await redis.info("clients"))["connected_clients"] == connections
        assert [info.started_at for info in found] == sorted(float(number) for number in range(1, 201))
    assert await redis.exists(RunKeys(run_id).heartbeats) == 0, "each process deletes its own heartbeat when it leaves"


async def test_several_runs_are_read_in_one_round_trip(redis, run_id, silent, monkeypatch):
    other = f"{run_id}-b"
    shared = info_of(None, f"controller-{run_id}")
    async with (
        Heartbeat(redis, info_of(run_id)),
        Heartbeat(redis, info_of(other, "learner-1")),
        Heartbeat(redis, shared),
    ):
        found = await live_by_run(redis, [None, run_id, other])
        assert [info.id for info in found[run_id]] == ["rollout-1"]
        assert [info.id for info in found[other]] == ["learner-1"]
        assert shared.id in [info.id for info in found[None]]
    assert not await redis.hexists(SHARED_HEARTBEATS, shared.id)


@pytest.mark.parametrize("seconds", [LAPSES_S + 1, 3600, -3600])
async def test_an_old_heartbeat_lapses_until_the_next_one(redis, run_id, silent, seconds):
    keys = RunKeys(run_id)
    async with Heartbeat(redis, info_of(run_id)) as heartbeat, Heartbeat(redis, info_of(run_id, "learner-1")):
        await set_back(redis, keys, "rollout-1", LAPSES_S - 3)
        assert await live(redis, run_id) == ["learner-1", "rollout-1"]
        await set_back(redis, keys, "rollout-1", seconds)
        assert await live(redis, run_id) == ["learner-1"], "the process died, or the clock of Redis jumped"
        assert await redis.hexists(keys.heartbeats, "rollout-1"), "after a jump it must be found"
        await heartbeat.update(state="ready")
        assert await live(redis, run_id) == ["learner-1", "rollout-1"]


async def test_a_process_that_lapsed_by_a_jump_survives(redis, run_id, silent, monkeypatch):
    keys, second_look = RunKeys(run_id), asyncio.Event()
    monkeypatch.setattr(heartbeat_module, "RETURNS_S", 0.2)
    assert await surviving_processes(redis, run_id) == []
    async with Heartbeat(redis, info_of(run_id)) as heartbeat, Heartbeat(redis, info_of(run_id, "learner-1")):
        assert len(await surviving_processes(redis, run_id)) == 2
        for process in ("rollout-1", "learner-1"):
            await set_back(redis, keys, process, 3600)
        asyncio.get_running_loop().call_later(0.1, second_look.set)
        looking = asyncio.create_task(surviving_processes(redis, run_id, "rollout"))
        await second_look.wait()
        await heartbeat.update(state="ready")
        assert [process.id for process in await looking] == ["rollout-1"]
        assert await surviving_processes(redis, run_id, "learner") == [], "it has died"
        assert await surviving_processes(redis, run_id, "verifier") == []


async def test_a_jump_of_the_clock_by_an_hour_deletes_nothing(redis, run_id, silent):
    async with Heartbeat(redis, info_of(run_id)):
        assert await redis.ttl(RunKeys(run_id).heartbeats) > 3600 + LAPSES_S


async def test_a_long_lapsed_heartbeat_is_deleted(redis, run_id, silent, monkeypatch):
    keys = RunKeys(run_id)
    monkeypatch.setattr(heartbeat_module, "FORGOTTEN_AT_ONCE", 2)
    async with Heartbeat(redis, info_of(run_id)):
        dead = [Heartbeat(redis, info_of(run_id, f"rollout-{number}")) for number in range(2, 6)]
        for heartbeat in dead:
            await heartbeat.update(state="ready")
        await set_back(redis, keys, "rollout-2", LAPSES_S + 1)
        for number in range(3, 6):
            await set_back(redis, keys, f"rollout-{number}", FORGOTTEN_S + 1)
        left = []
        for _ in range(3):
            assert await live(redis, run_id) == ["rollout-1"]
            left.append(len(await redis.hkeys(keys.heartbeats)))
        assert left == [3, 2, 2], "at most two at once"
        assert await redis.hexists(keys.heartbeats, "rollout-2"), "it lapsed just now and may return"


async def test_only_the_newest_lapsed_heartbeats_are_kept(redis, run_id, silent, monkeypatch):
    keys = RunKeys(run_id)
    monkeypatch.setattr(heartbeat_module, "LAPSED_KEPT", 2)
    for number, age_s in enumerate((70.0, 90.0, 80.0, 30.0)):
        await Heartbeat(redis, info_of(run_id, f"rollout-{number}")).update(state="ready")
        await set_back(redis, keys, f"rollout-{number}", age_s)
    assert await live(redis, run_id) == []
    assert sorted(await redis.hkeys(keys.heartbeats)) == [b"rollout-0", b"rollout-2", b"rollout-3"]


async def test_a_clock_set_back_deletes_no_live_heartbeat(redis, run_id, silent, monkeypatch):
    keys = RunKeys(run_id)
    monkeypatch.setattr(heartbeat_module, "LAPSED_KEPT", 1)
    for name, age_s in (("rollout-1", -3600.0), ("rollout-2", 120.0)):
        await Heartbeat(redis, info_of(run_id, name)).update(state="ready")
        await set_back(redis, keys, name, age_s)
    await live(redis, run_id)
    assert await redis.hkeys(keys.heartbeats) == [b"rollout-1"]


async def test_heartbeats_of_a_run_without_processes_expire(redis, run_id, silent):
    await Heartbeat(redis, info_of(run_id)).update(state="ready")
    assert 0 < await redis.ttl(RunKeys(run_id).heartbeats) <= FORGOTTEN_S


async def test_the_time_of_a_heartbeat_is_that_of_redis(redis, run_id, silent, monkeypatch):
    monkeypatch.setattr("services.streams.state.heartbeat.time.time", lambda: 1.0)
    before = await redis.time()
    async with Heartbeat(redis, info_of(run_id)):
        value = await redis.hget(RunKeys(run_id).heartbeats, "rollout-1")
        assert await live(redis, run_id) == ["rollout-1"]
    at_ms = int(value.partition(b" ")[0])
    assert before[0] * 1000 + before[1] // 1000 <= at_ms <= (await redis.time())[0] * 1000 + 1000


async def test_the_held_version_is_one_announced_since(redis, run_id, silent):
    """A failover may have lost the last heartbeats, so the ones that Redis has do not count."""
    assert await held_version(redis, run_id) == -1
    async with (
        Heartbeat(redis, info_of(run_id, version=3)) as first,
        Heartbeat(redis, info_of(run_id, "rollout-2", version=4)),
        Heartbeat(redis, info_of(run_id, "learner-1", version=9)),
    ):
        await set_back(redis, RunKeys(run_id), "rollout-2", LAPSES_S - 1)
        held = asyncio.create_task(held_version(redis, run_id))
        await asyncio.sleep(0.1)
        await first.update(version=7)
        assert await asyncio.wait_for(held, 30) == 7
        assert await live(redis, run_id) == ["learner-1", "rollout-1"], "the other replica lapsed meanwhile"
