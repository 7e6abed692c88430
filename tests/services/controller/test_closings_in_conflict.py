"""Closings that meet another platform on the same Redis, another request, or an error."""

import asyncio
import logging
import os

import pytest

from services.contracts import Closing, RunState
from services.controller.ended import closings, expiry
from services.controller.ended.closings import Closings
from services.settings import parse_recipe
from services.storage.mirror import MARK, files_place
from services.streams.connection.client import connect
from services.streams.keys import RunKeys
from services.streams.state.ended.closing import close_run
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import controlling, events_of, first_event, until_gone, until_state

RECIPE = parse_recipe(recipe_document("/model"))


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(closings, "PAUSE_S", (0.05, 0.2))


async def ended_at(redis, folder, run, *others):
    """A run that a platform has started and cancelled, and a file of it there; also in the folders of others."""
    records = RunRecords(redis)
    await records.create(run, RECIPE)
    async with controlling(redis, folder):
        await until_state(records, run, RunState.STARTING)
        await records.request_cancel(run)
        await until_state(records, run, RunState.CANCELLED)
    for runs in (folder, *others):
        (runs / run).mkdir(parents=True, exist_ok=True)
        (runs / run / "run.json").write_text("{}")
    return records


async def test_files_are_deleted_where_the_run_was_placed(own_server, run_id, tmp_path):
    _, redis = own_server
    here, there = tmp_path / "a", tmp_path / "b"
    records = await ended_at(redis, here, run_id, there)
    await close_run(redis, run_id, Closing.DELETING, files=True)
    async with controlling(redis, there):
        text = await first_event(redis, run_id, "closing-failed")
        assert text.startswith(f"its files are in {files_place(here)}, and those of this controller's runs in the runs")
        async with controlling(redis, here):
            await until_gone(records, run_id)
    assert not (here / run_id).exists()
    assert (there / run_id / "run.json").exists()


async def test_a_second_request_withdraws_the_files(own_server, run_id, tmp_path):
    """That folder or store may be gone."""
    _, redis = own_server
    records = await ended_at(redis, tmp_path / "a", run_id)
    (tmp_path / "a" / MARK).unlink()
    await close_run(redis, run_id, Closing.DELETING, files=True)
    async with controlling(redis, tmp_path / "a"):
        await first_event(redis, run_id, "closing-failed")
        await close_run(redis, run_id, Closing.DELETING)
        await until_gone(records, run_id)
    assert (tmp_path / "a" / run_id / "run.json").exists()


async def test_a_run_of_an_earlier_release_has_no_place(own_server, run_id, tmp_path):
    _, redis = own_server
    records = await ended_at(redis, tmp_path / "a", run_id, tmp_path / "b")
    await redis.hdel(RunKeys(run_id).record, "place")
    await close_run(redis, run_id, Closing.DELETING, files=True)
    async with controlling(redis, tmp_path / "b"):
        await until_gone(records, run_id)
    assert not (tmp_path / "b" / run_id).exists()


async def test_each_platform_expires_its_own_runs(own_server, run_id, tmp_path):
    _, redis = own_server
    records = await ended_at(redis, tmp_path / "a", run_id)
    await expiry.Expiry(redis, tmp_path / "b", 0.0).look(now=2e9)
    assert (await records.get(run_id)).closing is None
    await expiry.Expiry(redis, tmp_path / "a", 0.0).look(now=2e9)
    assert (await records.get(run_id)).closing is Closing.EXPIRING


def test_the_place_of_files_outlives_hosts_and_paths(tmp_path, store, monkeypatch):
    assert files_place(tmp_path) == os.environ["PENSTOCK_STORE"]
    monkeypatch.delenv("PENSTOCK_STORE")
    place = files_place(tmp_path / "runs")
    assert files_place(tmp_path / "runs") == place
    assert files_place(tmp_path / "other") != place
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert files_place(tmp_path / "moved") == place


@pytest.mark.parametrize("files", [True, False])
async def test_the_last_request_counts_while_keys_are_deleted(own_server, run_id, tmp_path, monkeypatch, files):
    _, redis = own_server
    records = await ended_at(redis, tmp_path, run_id)
    erase, erased, go = closings.erase, asyncio.Event(), asyncio.Event()

    async def slow(*arguments):
        done = await erase(*arguments)
        erased.set()
        await go.wait()
        return done

    monkeypatch.setattr(closings, "erase", slow)
    await close_run(redis, run_id, Closing.DELETING, files=not files)
    async with controlling(redis, tmp_path):
        await erased.wait()
        await close_run(redis, run_id, Closing.DELETING, files=files)
        go.set()
        await until_gone(records, run_id)
    assert (tmp_path / run_id).exists() is not files


async def test_a_file_in_place_of_the_folder_is_deleted(own_server, run_id, tmp_path):
    _, redis = own_server
    records = await ended_at(redis, tmp_path, run_id)
    for path in (tmp_path / run_id).iterdir():
        path.unlink()
    (tmp_path / run_id).rmdir()
    (tmp_path / run_id).write_text("not a folder")
    await close_run(redis, run_id, Closing.DELETING, files=True)
    async with controlling(redis, tmp_path):
        await until_gone(records, run_id)
    assert not (tmp_path / run_id).exists()


async def looks_of(redis):
    """How often controllers have looked for runs."""
    return (await redis.info("commandstats"))["cmdstat_smembers"]["calls"]


async def test_any_error_is_reported_and_waited_for(own_server, run_id, tmp_path, monkeypatch, caplog):
    """Waiting does not cure a missing permission, so each further attempt would be in vain."""
    server, redis = own_server
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(closings, "PAUSE_S", (30.0, 60.0))
    await ended_at(redis, tmp_path, run_id)
    await redis.execute_command("ACL", "SETUSER", "p", "on", ">secret", "~*", "+@all", "-scan")
    limited = await connect(f"redis://p:secret@127.0.0.1:{server.port}/0")
    await close_run(redis, run_id, Closing.DELETING)
    async with controlling(limited, tmp_path):
        assert "'scan'" in await first_event(redis, run_id, "closing-failed")
        looks, seen = await looks_of(redis), 0
        while seen < looks + 4:
            await asyncio.sleep(0.05)
            seen = await looks_of(redis)
        assert len(await events_of(redis, run_id, "closing-failed")) == 1
    assert "resuming the run" not in caplog.text
    await limited.aclose()


async def test_a_failure_after_the_deletion_leaves_nothing(own_server, run_id, tmp_path, monkeypatch):
    """Two controllers close a run: one fails when the other has deleted it."""
    _, redis = own_server
    await ended_at(redis, tmp_path, run_id)
    await close_run(redis, run_id, Closing.DELETING)

    async def late(*arguments):
        await Closings(redis, tmp_path).close(run_id, asyncio.Event())
        raise OSError("too late")

    check_left = closings.check_left

    async def once(*arguments):
        monkeypatch.setattr(closings, "check_left", check_left)
        await late(*arguments)

    monkeypatch.setattr(closings, "check_left", once)
    await Closings(redis, tmp_path).close(run_id, asyncio.Event())
    assert [key async for key in redis.scan_iter(match=RunKeys(run_id).key("*"))] == []


async def test_a_run_expires_with_one_event(own_server, run_id, tmp_path, monkeypatch):
    _, redis = own_server
    records = await ended_at(redis, tmp_path, run_id)
    await close_run(redis, run_id, Closing.EXPIRING)
    cut = []

    async def cut_off(*arguments):
        if not cut:
            cut.append(True)
            raise OSError("cut off between the event and the record")
        return await close_run(*arguments)

    monkeypatch.setattr(closings, "close_run", cut_off)
    await Closings(redis, tmp_path).close(run_id, asyncio.Event())
    assert (await records.get(run_id)).closing is Closing.EXPIRED
    assert cut
    assert len(await events_of(redis, run_id, "expired")) == 1
