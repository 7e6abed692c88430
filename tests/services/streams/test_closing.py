"""A closed run is never resumed; its keys, and only its own, are deleted in chunks that may be cut off and repeated."""

import asyncio

import pytest

from services.contracts import Closing, Lane, ProcessInfo, RunState, Sample
from services.settings import parse_recipe
from services.streams.connection.functions import FencedError
from services.streams.delivery.consumer import Consumer
from services.streams.keys import ACTIVE_RUNS, RUNS, RunKeys
from services.streams.runs.lists import RunFilter, RunLists
from services.streams.state import heartbeat as heartbeat_module
from services.streams.state.ended import cleanup
from services.streams.state.ended.cleanup import erase, sweep
from services.streams.state.ended.closing import check_left, close_run, delete_record
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import (
    ClosedRunError,
    ResumeChanges,
    RunRecords,
    RunStateError,
    UnknownRunError,
)
from tests.harness.small_run import recipe_document
from tests.services.driven import DrivenRun, set_back

RECIPE = parse_recipe(recipe_document("/model"))


async def ended(redis, run, state=RunState.FAILED):
    records = RunRecords(redis)
    await records.create(run, RECIPE, {"./rewards.py": "def score(): ..."})
    await records.transition(run, state, "test")
    return records


async def used(redis, run):
    """A failed run with groups in every state, and what they left."""
    records = await ended(redis, run)
    driven = await DrivenRun.open(redis, RunKeys(run))
    await driven.trained(1, "g0")
    await driven.batched(2, "g1")
    await driven.decided("g2", "kept")
    await driven.published("g3")
    await driven.dispatched("g4")
    await EventLog(redis, RunKeys(run), "test").write("stalled", "a line")
    await redis.set(RunKeys(run).starved, "0:5 1:0")
    return records


async def names(redis, run):
    """The names of the run's keys, without the prefix."""
    prefix = RunKeys(run).key("")
    return sorted([key.decode().removeprefix(prefix) async for key in redis.scan_iter(match=f"{prefix}*", count=1000)])


@pytest.mark.parametrize("state", [state for state in RunState if not state.ended])
@pytest.mark.parametrize("closing", Closing)
async def test_an_active_run_cannot_be_closed(redis, run_id, state, closing):
    records = RunRecords(redis)
    await records.create(run_id, RECIPE)
    if state is not RunState.QUEUED:
        await records.transition(run_id, state, "test")
    with pytest.raises(RunStateError, match=f"is {state.value}; cancel it first"):
        await close_run(redis, run_id, closing)
    assert (await records.get(run_id)).closing is None


async def test_a_run_that_succeeded_expires_and_is_deleted(redis, run_id):
    await ended(redis, run_id, RunState.SUCCEEDED)
    assert (await close_run(redis, run_id, Closing.EXPIRING)).closing is Closing.EXPIRING
    assert (await close_run(redis, run_id, Closing.DELETING)).closing is Closing.DELETING


@pytest.mark.parametrize(
    ("closings", "message"),
    [
        ([Closing.DELETING], "is being deleted"),
        ([Closing.EXPIRING], "has expired: its groups were deleted"),
        ([Closing.EXPIRING, Closing.EXPIRED], "has expired: its groups were deleted"),
    ],
)
async def test_a_closed_run_cannot_be_resumed(redis, run_id, closings, message):
    records = await ended(redis, run_id)
    for closing in closings:
        for _ in range(2):
            assert (await close_run(redis, run_id, closing)).closing is closing
    for changes in (ResumeChanges(), ResumeChanges(0)):
        with pytest.raises(ClosedRunError, match=message):
            await records.resume(run_id, changes)
    listed = run_id in [record.id for record in await records.active()]
    assert listed is closings[-1].open, "the controller has work until it has expired"
    record = await close_run(redis, run_id, Closing.DELETING, files=True)
    assert (record.closing, record.delete_files, record.state) == (Closing.DELETING, True, RunState.FAILED)
    assert not (await close_run(redis, run_id, Closing.DELETING)).delete_files, "the last request counts"
    with pytest.raises(ClosedRunError, match="is being deleted"):
        await close_run(redis, run_id, Closing.EXPIRING)


async def test_either_a_resumption_or_a_closing_succeeds(redis, run_id):
    records = await ended(redis, run_id)
    results = await asyncio.gather(
        *(ask for _ in range(5) for ask in (records.resume(run_id), close_run(redis, run_id, Closing.EXPIRING))),
        return_exceptions=True,
    )
    record = await records.get(run_id)
    assert (record.closing is None) == (record.state is RunState.QUEUED)
    assert sum(isinstance(result, RunStateError) for result in results) >= 5


async def test_a_deletion_frees_every_key_of_the_run_alone(redis, run_id, monkeypatch):
    monkeypatch.setattr(cleanup, "PER_CALL", 3)
    others = (f"{run_id}-b", f"b-{run_id}", run_id[:-1])
    records = await used(redis, run_id)
    for other in others:
        await used(redis, other)
    before = [await names(redis, other) for other in others]
    await close_run(redis, run_id, Closing.DELETING)
    assert len(await names(redis, run_id)) > 20
    assert await erase(redis, RunKeys(run_id), Closing.DELETING)
    assert await names(redis, run_id) == ["record"], "it is last, so that the deletion can be repeated"
    assert await delete_record(redis, run_id, files=False)
    assert await names(redis, run_id) == []
    with pytest.raises(UnknownRunError):
        await records.get(run_id)
    assert (await redis.zscore(RUNS, run_id), await redis.sismember(ACTIVE_RUNS, run_id)) == (None, 0)
    assert await delete_record(redis, run_id, files=False), "a repeated call is no error"
    assert [await names(redis, other) for other in others] == before
    assert set(others) <= {record.id for record in (await RunLists(redis).page(RunFilter(), 1000)).records}


async def test_a_deletion_that_was_cut_off_is_repeated(redis, run_id, monkeypatch):
    monkeypatch.setattr(cleanup, "PER_CALL", 3)
    await used(redis, run_id)
    await close_run(redis, run_id, Closing.DELETING)
    chunks = cleanup._chunks(redis, RunKeys(run_id), lambda key: not key.endswith(":record"))
    await redis.unlink(*await anext(chunks))
    await chunks.aclose()
    assert run_id in [record.id for record in await RunRecords(redis).active()], "the next controller continues"
    assert await erase(redis, RunKeys(run_id), Closing.DELETING)
    assert await delete_record(redis, run_id, files=False)
    assert await names(redis, run_id) == []


async def test_a_late_deletion_spares_a_new_run_with_the_same_id(redis, run_id):
    await ended(redis, run_id)
    await close_run(redis, run_id, Closing.DELETING)
    assert await delete_record(redis, run_id, files=False)
    await used(redis, run_id)
    before = await names(redis, run_id)
    assert not await erase(redis, RunKeys(run_id), Closing.DELETING)
    assert not await delete_record(redis, run_id, files=False)
    assert await names(redis, run_id) == before
    assert (await RunRecords(redis).get(run_id)).closing is None


async def test_an_expired_run_keeps_what_users_read(redis, run_id):
    await used(redis, run_id)
    keys = RunKeys(run_id)
    counts = await (await DrivenRun.open(redis, keys)).counts()
    await close_run(redis, run_id, Closing.EXPIRING)
    assert await erase(redis, keys, Closing.EXPIRING)
    left = await names(redis, run_id)
    counted = ["counters", "epoch:learner", "epoch:sampler", "events", "pending", "policy", "record", "steps"]
    assert left == [*counted, "tokens-in-flight"]
    assert await (await DrivenRun.open(redis, keys)).counts() == counts
    assert [*(await RunRecords(redis).get(run_id)).files] == ["./rewards.py"], "its digest is in the record"


async def test_a_run_with_live_processes_is_not_deleted(redis, run_id, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "RETURNS_S", 3.0)
    await ended(redis, run_id)
    info = ProcessInfo(id="rollout-7", service="rollout", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info):
        with pytest.raises(RunStateError, match=r"still has live processes \(rollout-7\); retry"):
            await check_left(redis, run_id)
        await set_back(redis, RunKeys(run_id), "rollout-7", 3600)
        with pytest.raises(RunStateError, match=r"still has live processes \(rollout-7\); retry"):
            await check_left(redis, run_id)
    await check_left(redis, run_id)


async def test_a_process_that_wakes_after_the_deletion_adds_nothing(redis, run_id):
    await used(redis, run_id)
    keys = RunKeys(run_id)
    consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).samples, "verifier", "v0", Sample, 30.0, 2)
    await consumer.open()
    await close_run(redis, run_id, Closing.DELETING)
    assert await erase(redis, keys, Closing.DELETING)
    assert await delete_record(redis, run_id, files=False)
    with pytest.raises(FencedError, match="no longer has the state of this run"):
        await consumer.read(4, 0.01)
    await EventLog(redis, keys, "verifier").write("service-failed", "it woke up")
    assert await names(redis, run_id) == []


@pytest.mark.parametrize("files", [False, True])
async def test_a_record_stays_if_the_request_was_changed(redis, run_id, files):
    await ended(redis, run_id)
    await close_run(redis, run_id, Closing.DELETING, files=files)
    assert not await delete_record(redis, run_id, files=not files)
    assert await delete_record(redis, run_id, files=files)


async def test_a_run_that_succeeded_keeps_what_is_said(redis, run_id):
    await used(redis, run_id)
    keys = RunKeys(run_id)
    await redis.set(keys.manifest, "buckets")
    await redis.xadd(keys.weight_plans, {"m": "plan"})
    await redis.hset(keys.heartbeats, "controller-1", "1 {}")
    await sweep(redis, keys)
    left = [name for name in await names(redis, run_id) if not name.startswith(("group:", "epoch:"))]
    assert left == [
        "counters",
        "events",
        "heartbeats",
        "pending",
        "policy",
        "queue",
        "record",
        "reward-files",
        "sampler-state",
        "step-tokens",
        "steps",
        "tokens-in-flight",
    ]


async def test_a_deleted_run_is_not_restored_as_lost(redis, run_id):
    """By a controller that was frozen while another one owned the run; a new run of that id may be lost."""
    records = await ended(redis, run_id)
    record = await records.get(run_id)
    await close_run(redis, run_id, Closing.DELETING)
    assert await delete_record(redis, run_id, files=False)
    assert not await records.restore_failed(record, "lost")
    assert not await records.exists(run_id)
    again = await (await ended(redis, run_id)).get(run_id)
    await redis.delete(RunKeys(run_id).record)
    assert await records.restore_failed(again, "lost")
    assert (await records.get(run_id)).reason == "lost"
