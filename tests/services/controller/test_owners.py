"""A run has one controller: the others leave it alone, and one that was replaced stops controlling it."""

import asyncio
from contextlib import asynccontextmanager
from logging import WARNING

from services.contracts import ProcessInfo, RunState
from services.controller.service import Controller
from services.streams.keys import RunKeys
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.ownership import become_owner
from tests.services.controller.hand_cluster import HandCluster, controlled, until, until_state
from tests.services.driven import set_back


def controller(run, number=2):
    place = {"host": "h", "pid": number, "metrics": ""}
    return ProcessInfo(id=f"controller-{number}", service="controller", run=run, **place, state="ready")


@asynccontextmanager
async def controlling(redis, cluster, folder):
    """The controller of another platform."""
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, cluster, folder).run(stopping))
    try:
        yield
    finally:
        stopping.set()
        await loop


async def owner(redis, run):
    """The id of the run's controller, from its heartbeat."""
    [name] = [name for name in await redis.hkeys(RunKeys(run).heartbeats) if name.startswith(b"controller-")]
    return name.decode()


async def test_a_run_owned_by_another_controller_is_left_to_it(redis, run_id, tmp_path):
    other = ProcessInfo(id="controller-2", service="controller", run=run_id, host="h", pid=2, metrics="", state="ready")
    keys = RunKeys(run_id)
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        async with Heartbeat(redis, other):
            fence = await become_owner(redis, keys, "controller")
            cluster.fault = ["seen only by the previous controller"]
            await asyncio.sleep(3.0)
            assert await redis.get(keys.epoch("controller")) == fence.token.encode(), (
                "this controller took the run over"
            )
            assert (await records.get(run_id)).state is RunState.STARTING
        await until_state(records, run_id, RunState.FAILED)


async def test_a_second_platform_leaves_a_run_to_its_controller(redis, run_id, tmp_path):
    """Two platforms share a Redis: the second one's controller starts nothing of a run that the first one controls."""
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until_state(records, run_id, RunState.STARTING)
        second = HandCluster(run_id)
        async with controlling(redis, second, tmp_path / "second"):
            cluster.fault = ["seen by the first controller"]
            record = await until_state(records, run_id, RunState.FAILED)
    assert "seen by the first controller" in record.reason
    assert second.requests == []


async def test_a_replaced_controller_stops_controlling(redis, run_id, tmp_path, caplog):
    """It may have been silent only, and its successor on the same platform has adopted the services."""
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until(lambda: cluster.looks >= 1)
        async with Heartbeat(redis, controller(run_id)):
            await become_owner(redis, RunKeys(run_id), "controller", "controller-2")
            await until(lambda: any("is left to the controller controller-2" in text for text in caplog.messages))
            looks = cluster.looks
            await asyncio.sleep(1.5)
            assert cluster.looks == looks
        assert cluster.requests == ["prepare", "start /prepared"]
        assert len([entry for entry in caplog.records if entry.levelno >= WARNING and run_id in entry.message]) == 1
        await until(lambda: cluster.looks > looks)
        assert (await records.get(run_id)).state is RunState.STARTING


async def test_a_jump_of_the_clock_moves_no_run(redis, run_id, tmp_path, caplog):
    async with controlled(redis, run_id, tmp_path) as (_, cluster):
        await until(lambda: cluster.looks >= 1)
        await set_back(redis, RunKeys(run_id), await owner(redis, run_id), 3600)
        second = HandCluster(run_id)
        async with controlling(redis, second, tmp_path / "second"):
            await until(lambda: any("is left to the controller" in text for text in caplog.messages))
    assert second.requests == []
    assert cluster.requests == ["prepare", "start /prepared", "stop"]


async def test_a_controller_that_died_is_replaced(redis, run_id, tmp_path):
    await Heartbeat(redis, controller(run_id)).update(state="ready")
    await set_back(redis, RunKeys(run_id), "controller-2", 11)
    async with controlled(redis, run_id, tmp_path) as (records, _):
        await until_state(records, run_id, RunState.STARTING)
