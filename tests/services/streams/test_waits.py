"""Waits are named, announced with the process, reported when they last, and shown as metrics."""

import asyncio
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import REGISTRY

from services.contracts import ProcessInfo
from services.process.hosting import host_service
from services.settings import parse_recipe
from services.streams.connection.client import connect
from services.streams.keys import RunKeys
from services.streams.state import heartbeat as heartbeat_module
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat, live_processes
from services.streams.state.runs import RunRecords
from services.waits import LONG_AFTER_S, Waits, describe_wait
from tests.harness.small_run import recipe_document
from tests.services.driven import put_stub_record


class Clock:
    """A clock in Unix seconds that the test advances."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def test_a_wait_keeps_its_beginning_while_its_text_changes():
    clock = Clock()
    waits = Waits(clock)
    waits.pending("verdicts", "5 groups", 60)
    clock.now += 10
    waits.pending("verdicts", "3 groups", 90, idle=True)
    [wait] = waits.current(clock.now)
    assert (wait.name, wait.waits_for, wait.since, wait.deadline_s, wait.idle) == (
        "verdicts",
        "3 groups",
        1000,
        90,
        True,
    )
    assert describe_wait("sampler-1", wait, clock.now) == (
        "sampler-1: waits for 3 groups (verdicts) for 10 s of at most 90 s"
    )
    waits.done("verdicts")
    waits.done("verdicts")
    waits.pending("verdicts", "3 groups", 90)
    assert waits.current(clock.now) == ()
    assert [wait.since for wait in waits.current(clock.now + 1)] == [1010]


def test_waits_are_shown_oldest_first_once_they_last_a_second():
    clock = Clock()
    waits = Waits(clock)
    for name in ("b", "a", "c"):
        waits.pending(name, "x", 60)
        clock.now += 1
    assert [wait.name for wait in waits.current(clock.now)] == ["b", "a", "c"]
    assert [wait.name for wait in waits.current(clock.now - 1)] == ["b", "a"]


def news(waits, now):
    """What is newly reported at `now`: its word and the wait's name."""
    return [(word, wait.name) for word, wait in waits.news(now)]


def test_a_stall_is_reported_once_per_wait():
    clock = Clock()
    waits = Waits(clock)
    waits.pending("sync", "replica 1", 10)
    assert waits.news(clock.now + 10) == []
    assert news(waits, clock.now + 10.5) == [("stalled", "sync")]
    waits.pending("sync", "replica 2", 10)
    assert waits.news(clock.now + 50) == [], "a reported stall is not reported again, nor as a long wait"
    waits.done("sync")
    clock.now += 60
    waits.pending("sync", "replica 2", 10)
    assert [(word, wait.waits_for) for word, wait in waits.news(clock.now + 11)] == [("stalled", "replica 2")]


def test_a_long_wait_is_reported_within_a_minute_unless_idle():
    clock = Clock()
    waits = Waits(clock)
    waits.pending("batch", "the sampler", 600)
    waits.pending("tasks", "work", 600, idle=True)
    assert LONG_AFTER_S + heartbeat_module.HEARTBEAT_S + heartbeat_module.PATIENCE_S < 60
    assert waits.news(clock.now + LONG_AFTER_S) == []
    assert news(waits, clock.now + LONG_AFTER_S + 0.1) == [("waiting", "batch")]
    assert waits.news(clock.now + 100) == []
    assert news(waits, clock.now + 601) == [("stalled", "batch"), ("stalled", "tasks")]
    assert waits.news(clock.now + 700) == []


def test_a_process_is_idle_while_all_its_waits_are_for_work():
    clock = Clock()
    waits = Waits(clock)
    clock.now += 5
    assert waits.idle_s(clock.now) == 0, "it works"
    waits.pending("tasks", "tasks", 60, idle=True)
    clock.now += 5
    waits.pending("tasks", "other tasks", 60, idle=True)
    clock.now += 5
    assert waits.idle_s(clock.now) == 10
    with waits.on("generation", "groups in the engine", 60):
        clock.now += 7
        assert waits.idle_s(clock.now) == 10, "it generates while it looks for tasks"
    clock.now += 1
    waits.pending("tasks", "the engine", 60)
    clock.now += 3
    waits.done("tasks")
    clock.now += 3
    assert waits.idle_s(clock.now) == 11


def test_a_wait_ends_with_its_body_even_on_an_error():
    waits = Waits(Clock())

    def fail():
        with waits.on("sync", "replica", 5):
            assert [wait.name for wait in waits.current(1001)] == ["sync"]
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert waits.current(1001) == ()


def test_wait_with_one_name_lasts_until_the_last_body_ends():
    clock = Clock()
    waits = Waits(clock)
    with waits.on("memory", "sample 1", 5):
        clock.now += 1
        with waits.on("memory", "sample 2", 5):
            pass
        [wait] = waits.current(clock.now)
        assert wait.since == 1000
    assert waits.current(clock.now) == ()


def test_a_body_does_not_end_the_wait_that_followed_its_own():
    clock = Clock()
    waits = Waits(clock)
    with waits.on("sync", "replica 1", 5):
        waits.done("sync")
        waits.pending("sync", "replica 2", 5)
    assert [wait.waits_for for wait in waits.current(1001)] == ["replica 2"]


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("inf"), float("nan")])
def test_no_wait_without_a_deadline(deadline_s):
    with pytest.raises(ValueError, match=f"deadline_s: {deadline_s} is not valid: expected .*'sync'"):
        Waits().pending("sync", "replica", deadline_s)


def test_threads_share_the_waits_of_their_process():
    waits = Waits()

    def work(number):
        for _ in range(300):
            with waits.on(f"rank-{number % 4}", "rank 0", 5):
                waits.current(time.time() + 2)
                waits.news(time.time() + 9)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8), timeout=90))
    assert waits.current(time.time() + 2) == ()


def info_of(run, name="learner-1"):
    return ProcessInfo(id=name, service=name.split("-")[0], run=run, host="h", pid=1, metrics="h:9")


def metric(name, run, wait):
    return REGISTRY.get_sample_value(name, {"run": run, "service": "learner", "wait": wait})


async def until(condition, deadline_s=90.0):
    """The first true answer of `condition`, a coroutine function."""
    ends = time.monotonic() + deadline_s
    while not (answer := await condition()):
        assert time.monotonic() < ends, "the condition did not become true in time"
        await asyncio.sleep(0.02)
    return answer


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.05)


async def test_the_heartbeat_announces_waits_and_reports_stalls(redis, run_id, quick):
    keys = RunKeys(run_id)
    await put_stub_record(redis, keys)
    event_log = EventLog(redis, keys, "learner")
    clock = Clock(time.time() - 50)
    waits = Waits(clock)
    waits.pending("batch", "the sampler's batch 7", 600)
    waits.pending("sync", "replica rollout-2", 20)
    clock.now = time.time() + 3600  # this wait stays short, however long the test takes
    waits.pending("short", "an example", 5)
    async with Heartbeat(redis, info_of(run_id), waits, event_log):
        await until(lambda: _at_least(event_log, 2))
        [process] = await live_processes(redis, run_id)
        assert {wait.name: wait.deadline_s for wait in process.waits} == {"batch": 600, "sync": 20}
        assert metric("penstock_wait_seconds", run_id, "sync") == pytest.approx(50, abs=10)
        assert metric("penstock_stalled_waits", run_id, "sync") == 1
        assert metric("penstock_stalled_waits", run_id, "batch") == 0
        waits.done("sync")
        await until(lambda: _announced(redis, run_id, {"batch"}))
        assert metric("penstock_wait_seconds", run_id, "sync") is None
        assert metric("penstock_stalled_waits", run_id, "sync") is None
    texts = {event.phase: event.text for _, event in await event_log.events()}
    assert set(texts) == {"stalled", "waiting"}
    assert texts["stalled"].startswith("learner-1: waits for replica rollout-2 (sync) for 5")
    assert texts["stalled"].endswith(" s of at most 20 s")
    assert texts["waiting"].startswith("learner-1: waits for the sampler's batch 7 (batch) for 5")
    assert len(await event_log.events()) == 2, "each wait is reported once"
    assert metric("penstock_wait_seconds", run_id, "batch") is None, "the metric ends with its process"


async def _at_least(event_log, count):
    events = await event_log.events()
    return events if len(events) >= count else []


async def _announced(redis, run, names):
    [process] = await live_processes(redis, run)
    return {wait.name for wait in process.waits} <= names


async def test_the_heartbeat_reports_stalls_after_redis_returns(own_server, run_id, quick, monkeypatch, caplog):
    server, redis = own_server
    event_log = EventLog(redis, RunKeys(run_id), "learner")
    clock = Clock(time.time() - 100)
    waits = Waits(clock)
    caplog.set_level(logging.WARNING)
    async with Heartbeat(redis, info_of(run_id), waits, event_log):
        server.stop()
        waits.pending("redis", "Redis to come back", 30)
        await until(lambda: _logged(caplog, "heartbeat of learner-1 failed"))
        assert await _logged(caplog, "stalled: learner-1: waits for Redis to come back (redis)")
        server.start(60)
        await put_stub_record(redis, RunKeys(run_id))
        [(_, event)] = await until(event_log.events)
        assert (event.phase, event.text[:47]) == ("stalled", "learner-1: waits for Redis to come back (redis)")
        assert [process.id for process in await live_processes(redis, run_id)] == ["learner-1"]


async def test_stalls_are_logged_while_redis_hangs(own_server, run_id, quick, monkeypatch, caplog):
    monkeypatch.setattr(heartbeat_module, "PATIENCE_S", 0.3)
    server, redis = own_server
    clock = Clock(time.time() - 100)
    waits = Waits(clock)
    async with Heartbeat(redis, info_of(run_id), waits, EventLog(redis, RunKeys(run_id), "learner")) as heartbeat:
        os.kill(server._process.pid, signal.SIGSTOP)
        try:
            await until(lambda: _logged(caplog, "heartbeat of learner-1 failed: TimeoutError"))
            waits.pending("redis", "Redis to answer", 30)
            await until(lambda: _logged(caplog, "stalled: learner-1: waits for Redis to answer (redis)"))
        finally:
            os.kill(server._process.pid, signal.SIGCONT)
        await until(lambda: _announced(redis, run_id, {"redis"}))
        await heartbeat.update(state="ready")


async def _logged(caplog, text):
    return any(text in record.getMessage() for record in caplog.records)


async def test_a_jump_of_the_hosts_clock_stalls_nothing(redis, run_id, quick, monkeypatch, caplog):
    waits, real = Waits(), time.time
    waits.pending("batch", "the sampler's batch 7", 600)
    async with Heartbeat(redis, info_of(run_id), waits) as heartbeat:
        monkeypatch.setattr("services.streams.state.heartbeat.time.time", lambda: real() + 3600)

        async def announced():
            await heartbeat.update()
            [process] = await live_processes(redis, run_id)
            return metric("penstock_wait_seconds", run_id, "batch") and process.waits

        [wait] = await until(announced)
        assert not wait.stalled(time.time())
        assert 0 < time.time() - wait.since < 300, "it is shown as it began by the new clock"
        assert metric("penstock_stalled_waits", run_id, "batch") == 0
    assert [text for text in caplog.messages if "stalled" in text] == []


async def test_a_full_redis_still_takes_heartbeats_and_events(own_server, run_id, quick):
    _, redis = own_server
    await put_stub_record(redis, RunKeys(run_id))
    event_log = EventLog(redis, RunKeys(run_id), "learner")
    waits = Waits(Clock(time.time() - 100))
    async with Heartbeat(redis, info_of(run_id), waits, event_log) as heartbeat:
        await redis.config_set("maxmemory", 1)
        waits.pending("redis-memory", "room in Redis", 30)
        [(_, event)] = await until(event_log.events)
        assert event.phase == "stalled"
        await heartbeat.update(state="ready", version=3)
        [process] = await live_processes(redis, run_id)
        assert (process.state, [wait.name for wait in process.waits]) == ("ready", ["redis-memory"])


async def test_an_unreadable_announcement_is_omitted(redis, run_id):
    keys = RunKeys(run_id)
    async with Heartbeat(redis, info_of(run_id)):
        now, _ = await redis.time()
        await redis.hset(keys.heartbeats, mapping={"broken": b'%d000 {"id": 7}' % now, "timeless": b'{"id": 7}'})
        assert [process.id for process in await live_processes(redis, run_id)] == ["learner-1"]
        assert await redis.hkeys(keys.heartbeats) == [b"learner-1", b"broken"]


async def test_a_service_names_its_waits_in_its_context(redis, redis_url, run_id, quick):
    class Waiter:
        name = "waiter"

        async def run(self, context):
            with context.waits.on("work", "a request to stop", 600, idle=True):
                await context.stopping.wait()

    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")))
    stopping = asyncio.Event()
    serving = asyncio.create_task(host_service(Waiter(), run_id, redis_url, stopping))

    async def announced():
        return [wait for process in await live_processes(redis, run_id) for wait in process.waits]

    [wait] = await until(announced)
    assert (wait.name, wait.waits_for, wait.idle) == ("work", "a request to stop", True)
    stopping.set()
    await asyncio.wait_for(serving, 60)
    assert await live_processes(redis, run_id) == []


async def test_an_announcement_survives_a_broken_connection(redis_url, run_id):
    redis = await connect(redis_url)
    async with Heartbeat(redis, info_of(run_id)) as heartbeat:
        await redis.connection_pool.disconnect()
        await heartbeat.update(state="ready")
        [process] = await live_processes(redis, run_id)
        assert process.state == "ready"
    await redis.aclose()
