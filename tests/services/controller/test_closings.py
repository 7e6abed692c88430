"""The controller closes ended runs: it deletes them, with their files, and retries what fails."""

import asyncio

import pytest

from services.contracts import Closing, RunState
from services.controller.ended import closings
from services.controller.service import Controller
from services.storage import objects
from services.storage.mirror import run_mirror
from services.streams.keys import RunKeys
from services.streams.state.ended.closing import close_run
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords, UnknownRunError
from tests.services.controller.hand_cluster import HandCluster, controlled, first_event, replica, until_state


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(closings, "PAUSE_S", (0.05, 0.2))
    monkeypatch.setattr(objects, "PAUSE_S", 0.05)


def write_files(folder, store=None):
    """Files of a run, and of another one beside it."""
    for name in (folder.name, f"{folder.name}-b"):
        (folder.parent / name / "records").mkdir(parents=True, exist_ok=True)
        (folder.parent / name / "records/step-000001.json").write_text("{}")
        if store:
            run_mirror(name).put("records/step-000001.json", folder.parent / name / "records/step-000001.json")


async def until_gone(records, run):
    async with asyncio.timeout(60):
        while True:
            try:
                await records.get(run)
            except UnknownRunError:
                return
            await asyncio.sleep(0.05)


async def keys_of(redis, run):
    return [key async for key in redis.scan_iter(match=RunKeys(run).key("*"), count=1000)]


async def cancelled(records, run):
    await until_state(records, run, RunState.STARTING)
    await records.request_cancel(run)
    await until_state(records, run, RunState.CANCELLED)


@pytest.mark.parametrize("files", [False, True])
async def test_a_run_is_deleted_with_its_files_or_without(redis, run_id, tmp_path, store, files):
    write_files(tmp_path / run_id, store)
    async with controlled(redis, run_id, tmp_path) as (records, _):
        await cancelled(records, run_id)
        await close_run(redis, run_id, Closing.DELETING, files=files)
        await until_gone(records, run_id)
    assert await keys_of(redis, run_id) == []
    assert (tmp_path / run_id / "records/step-000001.json").exists() is not files
    assert (tmp_path / run_id).exists() is not files
    assert ("records/step-000001.json" in run_mirror(run_id).listed()) is not files
    assert (run_mirror(run_id).listed() == {}) is files
    assert (tmp_path / f"{run_id}-b/records/step-000001.json").exists()
    assert list(run_mirror(f"{run_id}-b").listed()) == ["records/step-000001.json"]


async def test_a_link_to_a_folder_elsewhere_is_not_followed(redis, run_id, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_files(elsewhere / "kept")
    async with controlled(redis, run_id, tmp_path / "runs") as (records, _):
        await cancelled(records, run_id)
        folder = tmp_path / "runs" / run_id
        for path in folder.iterdir():
            path.unlink()
        (folder / "inside").symlink_to(elsewhere)
        await close_run(redis, run_id, Closing.DELETING, files=True)
        await until_gone(records, run_id)
    assert not folder.exists()
    assert (elsewhere / "kept/records/step-000001.json").exists()


async def test_a_deletion_waits_for_processes_and_the_store(redis, run_id, tmp_path, own_store):
    write_files(tmp_path / run_id, own_store)
    async with controlled(redis, run_id, tmp_path) as (records, _):
        await cancelled(records, run_id)
        async with Heartbeat(redis, replica(run_id)):
            await close_run(redis, run_id, Closing.DELETING, files=True)
            assert "still has live processes (rollout-1)" in await first_event(redis, run_id, "closing-failed")
            own_store.kill()
        async with asyncio.timeout(60):
            text = ""
            while "could not be listed" not in text:
                text = await first_event(redis, run_id, "closing-failed")
        assert (await records.get(run_id)).closing is Closing.DELETING
        own_store.start()
        await until_gone(records, run_id)
    assert await keys_of(redis, run_id) == [], "the event of the failure is deleted too"
    assert run_mirror(run_id).listed() == {}


async def test_the_next_controller_continues_a_deletion(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, _):
        await cancelled(records, run_id)
    await close_run(redis, run_id, Closing.DELETING)
    await redis.unlink(RunKeys(run_id).events)
    stopping = asyncio.Event()
    loop = asyncio.create_task(Controller(redis, HandCluster(run_id), tmp_path).run(stopping))
    await until_gone(RunRecords(redis), run_id)
    stopping.set()
    await loop
    assert await keys_of(redis, run_id) == []
