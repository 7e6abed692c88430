"""The controller closes ended runs: it deletes them, with their files, and retries what fails."""

import asyncio

import pytest

from deploy.local.preflight import StackError, check_expiry
from services.contracts import Closing, RunState
from services.controller.ended import closings, expiry
from services.settings import ExpiryError, load_expiry, parse_recipe
from services.settings.operator.expiry import VARIABLE
from services.storage import objects
from services.storage.mirror import run_mirror
from services.streams.keys import UNCLOSED_RUNS, RunKeys
from services.streams.state.ended.closing import close_run
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import ClosedRunError, RunRecords
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import (
    controlled,
    controlling,
    events_of,
    first_event,
    replica,
    until_gone,
    until_state,
)
from tests.services.driven import DrivenRun


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


async def until_closed(records, run, expected):
    async with asyncio.timeout(60):
        closing = None
        while closing is not expected:
            await asyncio.sleep(0.05)
            closing = (await records.get(run)).closing


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
    async with controlling(redis, tmp_path):
        await until_gone(RunRecords(redis), run_id)
    assert await keys_of(redis, run_id) == []


async def ended(records, run, state):
    await records.create(run, parse_recipe(recipe_document("/model")))
    await records.transition(run, state, "test")


async def test_ended_runs_expire(own_server, tmp_path, monkeypatch):
    _, redis = own_server
    monkeypatch.setenv(VARIABLE, "3")
    monkeypatch.setattr(expiry, "LOOK_S", 0.0)
    monkeypatch.setattr(expiry, "CLOSED_AT_ONCE", 1)
    records, old = RunRecords(redis), {state.value: state for state in RunState if state.ended}
    for run, state in old.items():
        await ended(records, run, state)
        await (await DrivenRun.open(redis, RunKeys(run))).published("g0")
    async with controlling(redis, tmp_path):
        for run, state in old.items():
            assert (await first_event(redis, run, "expired")).startswith(f"{state.value} at 20")
            await until_closed(records, run, Closing.EXPIRED)
            assert not [key for key in await keys_of(redis, run) if b":group:" in key or b":payload:" in key]
            assert (await group_counts(redis, RunKeys(run))).dispatched == 1
            with pytest.raises(ClosedRunError, match="has expired"):
                await records.resume(run)
            assert len(await events_of(redis, run, "expired")) == 1
        await ended(records, "young", RunState.FAILED)
        await asyncio.sleep(1.2)
    assert (await records.get("young")).closing is None


async def test_a_run_of_another_release_is_cancelled_and_expires(own_server, tmp_path, monkeypatch, caplog):
    """This release cannot read its recipe; until a user asks, it may belong to another release's controller."""
    _, redis = own_server
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(expiry, "LOOK_S", 0.0)
    records = RunRecords(redis)
    for run in ("old", "other"):
        await records.create(run, parse_recipe(recipe_document("/model")))
    await redis.hset(RunKeys("old").record, "recipe", '{"name": "old"}')
    async with controlling(redis, tmp_path) as cluster:
        await until_state(records, "other", RunState.STARTING)
        assert (await records.get("old")).state is RunState.QUEUED
        told = [record.getMessage() for record in caplog.records if "recipe.model: missing" in record.getMessage()]
        assert len(told) == 1
        await records.request_cancel("old")
        assert (await until_state(records, "old", RunState.CANCELLED)).reason.startswith(
            "cancelled on request; run 'old'"
        )
        assert "stop" in cluster.requests
        await until_closed(records, "old", Closing.EXPIRED)
        await close_run(redis, "old", Closing.DELETING)
        await until_gone(records, "old")


async def test_a_run_that_was_resumed_meanwhile_does_not_expire(own_server, run_id, tmp_path, monkeypatch):
    _, redis = own_server
    records = RunRecords(redis)
    await ended(records, run_id, RunState.FAILED)
    await redis.zadd(UNCLOSED_RUNS, {run_id: 1.0, f"{run_id}-gone": 2.0})  # as they were read
    close = expiry.close_run

    async def late(redis, run, closing):
        if run == run_id:
            await records.resume(run)
        return await close(redis, run, closing)

    monkeypatch.setattr(expiry, "close_run", late)
    await expiry.Expiry(redis, tmp_path, 10.0).look(now=100.0)
    record = await records.get(run_id)
    assert (record.state, record.closing) == (RunState.QUEUED, None)


async def ends_at(redis, run, at):
    """Set back when a run ended."""
    await redis.zadd(UNCLOSED_RUNS, {run: at})


async def test_a_host_whose_clock_jumped_expires_nothing(own_server, run_id, tmp_path):
    _, redis = own_server
    records = RunRecords(redis)
    await ended(records, run_id, RunState.FAILED)
    seconds, _ = await redis.time()
    await ends_at(redis, run_id, seconds - 5.0)
    await expiry.Expiry(redis, tmp_path, 1800.0).look(now=seconds + 3600.0)
    assert (await records.get(run_id)).closing is None
    await expiry.Expiry(redis, tmp_path, 4.0).look(now=seconds + 3600.0)
    assert (await records.get(run_id)).closing is Closing.EXPIRING


async def test_a_run_that_ended_within_this_second_expires(own_server, run_id, tmp_path):
    _, redis = own_server
    records = RunRecords(redis)
    await ended(records, run_id, RunState.FAILED)
    microseconds = 1_000_000
    while microseconds > 500_000:  # leaves the look half a second in the same one
        await asyncio.sleep(0.01)
        seconds, microseconds = await redis.time()
    await ends_at(redis, run_id, seconds + microseconds / 1e6)
    await expiry.Expiry(redis, tmp_path, 0.0).look(now=seconds + 3600.0)
    assert (await records.get(run_id)).closing is Closing.EXPIRING


async def test_many_runs_of_another_platform_do_not_stop_expiry(own_server, run_id, tmp_path, monkeypatch):
    _, redis = own_server
    monkeypatch.setattr(expiry, "READ_AT_ONCE", 2)
    records = RunRecords(redis)
    for number in range(5):
        await ended(records, f"elsewhere-{number}", RunState.FAILED)
        await records.set_paths(f"elsewhere-{number}", place="s3://another/place")
    await ended(records, run_id, RunState.FAILED)
    await expiry.Expiry(redis, tmp_path, 0.0).look(now=2e9)
    assert (await records.get(run_id)).closing is Closing.EXPIRING
    assert (await records.get("elsewhere-0")).closing is None


@pytest.mark.parametrize(("text", "seconds"), [("", 14 * 86400.0), ("0", None), ("3600", 3600.0), ("1e3", 1000.0)])
def test_the_operator_sets_when_runs_expire(monkeypatch, text, seconds):
    monkeypatch.setenv(VARIABLE, text)
    assert load_expiry() == seconds


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "14d"])
def test_an_invalid_expiry_is_named(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    expected = f"PENSTOCK_EXPIRE_ENDED_S: '{text}' is not valid: expected a number of seconds; 0: runs never expire"
    with pytest.raises(ExpiryError, match=f"^{expected}$"):
        load_expiry()
    with pytest.raises(StackError, match=f"^{expected}$"):
        check_expiry()
