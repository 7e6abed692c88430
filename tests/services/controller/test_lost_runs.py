"""A run that Redis has lost: its services stop, and its record is there again, as failed, with the reason."""

import asyncio

import pytest

from services.contracts import RunState
from services.storage.mirror import files_place
from services.streams.connection.client import RedisOutageError
from services.streams.keys import RUNS, RunKeys
from services.streams.state.ended.closing import delete_record
from services.streams.state.runs import RecordChange
from tests.services.controller.hand_cluster import HandCluster, controlled, until, until_state

LOST = "Redis lost the state of this run"


async def empty(redis, run):
    """What a restart without its data does to a run, on a server that other tests use."""
    await redis.delete(*[key async for key in redis.scan_iter(f"{RunKeys(run).key('')}*")])
    await redis.zrem(RUNS, run)


class EmptyingCluster(HandCluster):
    """Redis loses the run during a request of the controller, which may fail too."""

    def __init__(self, redis, run, moment, error=None):
        super().__init__(run)
        self._redis, self._moment, self._error = redis, moment, error

    async def _reached(self, moment):
        if moment == self._moment:
            self._moment = ""
            await empty(self._redis, self.only)
            if self._error:
                raise self._error

    async def start(self, record):
        await super().start(record)
        await self._reached("start")

    async def faults(self, run, ready, joining):
        found = await super().faults(run, ready, joining)
        if self.looks > 2:
            await self._reached("look")
        return found

    async def stop(self, run, deadline_s):
        await super().stop(run, deadline_s)
        await self._reached("stop")


async def failed(records, run, folder, cluster):
    record = await until_state(records, run, RunState.FAILED)
    assert record.reason.startswith(LOST)
    assert str(folder / run) in record.reason
    assert cluster.requests[-1] == "stop"
    return record


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        ("start", None),
        ("start", TimeoutError("the fleet was not deployed")),
        ("look", None),
        ("look", RedisOutageError("Redis has been unavailable for 60 s")),
        ("stop", None),
    ],
)
async def test_a_run_that_redis_loses_fails(redis, run_id, tmp_path, caplog, moment, error):
    cluster = EmptyingCluster(redis, run_id, moment, error)
    async with controlled(redis, run_id, tmp_path, cluster) as (records, _):
        if moment == "stop":
            await until(lambda: cluster.looks > 2)
            await records.request_cancel(run_id)
        record = await failed(records, run_id, tmp_path, cluster)
        await asyncio.sleep(1.2)
        assert cluster.requests.count("stop") == (2 if moment == "stop" else 1), "it is ended once"
    assert (record.history[0].state, record.history[-1].state) == (RunState.QUEUED, RunState.FAILED)
    assert [text.startswith(f"run {run_id}: {LOST}") for text in caplog.messages].count(True) == 1


async def test_a_lost_run_fails_although_it_cannot_be_stopped(redis, run_id, tmp_path):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until(lambda: cluster.looks > 2)
        cluster.failing["stop"] = [OSError("the fleet does not answer")]
        await empty(redis, run_id)
        record = await failed(records, run_id, tmp_path, cluster)
    assert [change.state for change in record.history] == ["queued", "starting", "failed"]
    assert record.place == files_place(tmp_path), "only this platform deletes its files"
    assert record.reason.endswith("; stopping its services failed: the fleet does not answer")


@pytest.mark.parametrize("closing", [False, True])
async def test_a_run_that_ended_and_was_deleted_is_not_lost(redis, run_id, tmp_path, closing):
    async with controlled(redis, run_id, tmp_path) as (records, cluster):
        await until(lambda: cluster.looks > 2)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
        if closing:  # as another platform's controller does it, between two looks of this one
            await records.change(run_id, {RunState.CANCELLED}, RecordChange(fields={"closing": "deleting"}))
            assert await delete_record(redis, run_id, files=False)
        else:
            await empty(redis, run_id)
        await asyncio.sleep(1.5)
        assert not await records.exists(run_id)
    assert cluster.requests.count("stop") == 1
