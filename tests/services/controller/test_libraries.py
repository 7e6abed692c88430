"""Function libraries that no process announces are deleted, and loaded again by a process that calls one."""

import logging

import pytest

from services.contracts import ProcessInfo
from services.controller.ended import libraries
from services.controller.ended.libraries import Libraries
from services.streams.connection import functions
from services.streams.connection.client import connect
from services.streams.connection.functions import library, load
from services.streams.connection.libraries import delete_library, list_libraries
from services.streams.keys import RunKeys
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.streams.state.ownership import become_owner
from services.streams.state.stats import HIGH_WATER

OLD, OLDER = "penstock_0123456789ab", "penstock_ba9876543210"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(libraries, "LOOK_S", 0.0)


async def load_old(redis, *names):
    for name in names:
        code = f"#!lua name={name}\nredis.register_function('{name}_f', function() return 1 end)"
        await redis.function_load(code, replace=True)


def process(run, name):
    return ProcessInfo(id=name, service="rollout", run=run, host="h", pid=1, metrics="h:9")


async def announcing(redis, info, name):
    """A heartbeat of a process that uses the library `name`."""
    heartbeat = Heartbeat(redis, info)
    heartbeat.info = heartbeat.info.model_copy(update={"library": name})
    await heartbeat.update(state="ready")
    return heartbeat


async def test_unused_libraries_are_deleted_at_the_second_look(own_server, run_id, caplog):
    caplog.set_level(logging.INFO)
    _, redis = own_server
    await load_old(redis, OLD, OLDER, "another_s")
    await load(redis)
    old = await announcing(redis, process(run_id, "rollout-1"), OLD)
    older = await announcing(redis, process(None, "controller-1"), OLDER)
    looks = Libraries(redis)
    for _ in range(3):
        await looks.look([run_id])
    assert await list_libraries(redis) == {OLD, OLDER, library().name}, "processes of a run and shared ones use them"
    await redis.hdel(RunKeys(run_id).heartbeats, old.info.id)
    await looks.look([run_id])
    assert OLD in await list_libraries(redis), "its processes may only be late"
    await old.update(state="ready")
    await looks.look([run_id])
    await redis.hdel(RunKeys(run_id).heartbeats, old.info.id)
    await looks.look([run_id])
    assert OLD in await list_libraries(redis)
    await looks.look([run_id])
    assert await list_libraries(redis) == {OLDER, library().name}
    assert f"deleted the functions {OLD} from Redis: no process uses them" in caplog.text
    await redis.hdel("penstock:{-}:heartbeats", older.info.id)
    for _ in range(2):
        await looks.look([run_id])
    names = [dict(zip(about[::2], about[1::2], strict=True))[b"library_name"] for about in await redis.function_list()]
    assert sorted(names) == [b"another_s", library().name.encode()], "other programs' libraries stay"


async def test_libraries_stay_beside_an_earlier_release(own_server, run_id):
    """Its processes announce themselves under other keys, and no library."""
    _, redis = own_server
    await load_old(redis, OLD)
    keys = RunKeys(run_id)
    await redis.sadd(keys.key("processes"), "rollout-old")
    await redis.set(keys.key("process:rollout-old"), process(run_id, "rollout-old").model_dump_json(), px=10_000)
    looks = Libraries(redis)
    for _ in range(3):
        await looks.look([f"{run_id}-b", run_id])
    assert OLD in await list_libraries(redis)
    await redis.delete(keys.key("processes"))
    await looks.look([run_id])
    assert OLD in await list_libraries(redis), "looks before do not count"
    await looks.look([run_id])
    assert OLD not in await list_libraries(redis)


async def test_libraries_stay_while_redis_is_short_of_memory(own_server, run_id):
    """Redis at its maxmemory accepts no library, so a process that still needs one could not load it again."""
    _, redis = own_server
    await load_old(redis, OLD)
    used = (await redis.info("memory"))["used_memory"]
    await redis.config_set("maxmemory", int(used / (HIGH_WATER + 0.05)))
    looks = Libraries(redis)
    for _ in range(3):
        await looks.look([run_id])
    assert OLD in await list_libraries(redis)
    await redis.config_set("maxmemory", 4 * used)
    for _ in range(2):
        await looks.look([run_id])
    assert OLD not in await list_libraries(redis)


async def test_a_process_whose_library_was_deleted_loads_it_again(own_server, run_id):
    _, redis = own_server
    await become_owner(redis, RunKeys(run_id), "sampler")
    await delete_library(redis, library().name)
    await delete_library(redis, library().name)
    assert await list_libraries(redis) == set()
    assert (await become_owner(redis, RunKeys(run_id), "sampler")).epoch == 2
    assert await list_libraries(redis) == {library().name}


async def test_every_heartbeat_announces_its_library(redis, run_id):
    async with Heartbeat(redis, process(run_id, "rollout-1")):
        [found] = await live_processes(redis, run_id)
    assert found.library == library().name
    assert found.library.startswith(functions.PREFIX)


async def test_a_user_without_the_permission_is_reported_once(own_server, run_id, caplog):
    server, redis = own_server
    await load_old(redis, OLD)
    await redis.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-function|list")
    limited = await connect(f"redis://limited:secret@127.0.0.1:{server.port}/0")
    looks = Libraries(limited)
    for _ in range(3):
        await looks.look([run_id])
    warnings = [record.getMessage() for record in caplog.records if "functions of earlier releases" in record.message]
    assert len(warnings) == 1
    assert OLD in await list_libraries(redis)
    await limited.aclose()
