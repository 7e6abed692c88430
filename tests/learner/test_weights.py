"""Publication: real Gloo groups, a receiver killed in mid-broadcast, a late joiner, reuse of a healthy group."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import Snapshot, sums_of
from services.contracts import ProcessInfo, TensorEntry, WeightManifest
from services.contracts.weight_layout import bucket_layout, cut_buckets
from services.settings import WeightsSettings
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.policy_history import History, VersionLostError
from services.waits import cancel_and_wait
from tests.learner.receiver import Receiver
from tests.learner.running import until_event
from tests.services.driven import put_stub_record

ROOT = Path(__file__).parents[2]
ENTRIES = [
    TensorEntry(name="first", shape=(300, 1000), dtype="float32"),
    TensorEntry(name="odd", shape=(3,), dtype="bfloat16"),
    TensorEntry(name="last", shape=(250, 1000), dtype="float32"),
]


def snapshot(version: int) -> Snapshot:
    manifest = WeightManifest(buckets=cut_buckets(ENTRIES, 1_000_100))
    random = torch.Generator().manual_seed(version)
    buckets = tuple(
        torch.randint(0, 256, (bucket_layout(entries).size,), dtype=torch.uint8, generator=random)
        for entries in manifest.buckets
    )
    return Snapshot.of(version, manifest, buckets, [sums_of(bucket.numpy()) for bucket in buckets])


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, f"waited {deadline_s} s for {what}"
        await asyncio.sleep(0.05)


async def announced(redis: Any, keys: RunKeys, name: str) -> None:
    ends = time.monotonic() + 60
    while not await redis.hexists(keys.heartbeats, name):
        assert time.monotonic() < ends, f"{name} did not announce itself"
        await asyncio.sleep(0.05)


def holds(receiver: Receiver, expected: Snapshot) -> bool:
    return receiver.version == expected.version and all(
        torch.equal(receiver.weights[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in expected.tensors()
    )


def all_hold(receivers: list[Receiver], expected: Snapshot) -> bool:
    return all(holds(receiver, expected) for receiver in receivers)


@pytest.fixture
async def publisher(redis: Any, run_id: str) -> AsyncIterator[Publisher]:
    keys = RunKeys(run_id)
    settings = WeightsSettings(bucket_mib=1, timeout_s=15.0)
    history = await History.fenced(redis, keys, "learner")
    await put_stub_record(redis, keys)
    publisher = Publisher(redis, keys, EventLog(redis, keys, "learner"), settings, "127.0.0.1", history)
    await publisher.open(snapshot(0).manifest)
    yield publisher
    await publisher.close()


@pytest.fixture
async def start(redis: Any, run_id: str) -> AsyncIterator[Callable[[str], Receiver]]:
    tasks = []

    def begin(name: str) -> Receiver:
        receiver = Receiver(redis, run_id, name)
        tasks.append(asyncio.create_task(receiver.run()))
        return receiver

    yield begin
    await cancel_and_wait(*tasks)


def test_manifest_has_two_buckets_of_whole_tensors() -> None:
    names = [[entry.name for entry in bucket] for bucket in snapshot(0).manifest.buckets]
    assert names == [["first"], ["odd", "last"]] or names == [["first", "odd"], ["last"]]


async def test_a_version_reaches_all_and_a_healthy_group_is_reused(
    publisher: Publisher, start: Any, redis: Any, run_id: str
) -> None:
    first, second = start("one"), start("two")
    for name in ("one", "two"):
        await announced(redis, RunKeys(run_id), name)
    for version in range(3):
        current = snapshot(version)
        seconds = await publisher.publish(current)
        assert holds(first, current)
        assert holds(second, current)
        assert seconds < 15
    used = {plan.generation for plan in first.plans if plan.members.keys() == {"one", "two"}}
    assert len(used) == 1
    assert used.pop() >> 20 == publisher._history.fence.epoch


@pytest.mark.parametrize("known", [True, False])
async def test_a_version_that_redis_lost_stops_the_publisher(
    publisher: Publisher, redis: Any, run_id: str, known: bool
) -> None:
    """A replica that holds it would take no older one; one that was announced before this learner is no loss."""
    history = publisher._history
    version = await history.announce(0, "w0", 1, held=8 if known else 5)
    await history.commit_policy(version, 0, "w0")
    info = ProcessInfo(
        id="ahead", service="rollout", run=run_id, host="h", pid=1, metrics="h:9", state="ready", version=9
    )
    async with Heartbeat(redis, info):
        if known:
            assert await publisher.publish(snapshot(6)) < 25
            publisher.check()
        else:
            with pytest.raises(VersionLostError, match="policy version 9, but the newest that was announced is 6"):
                await publisher.publish(snapshot(6))


async def test_a_joiner_is_served_while_the_learner_computes(publisher: Publisher, start: Any) -> None:
    current = snapshot(4)
    assert await publisher.publish(current) < 25  # without replicas it must return before its deadline of 30 s
    computing = threading.Event()

    def learn() -> None:
        weights = torch.randn(800, 800)
        while not computing.is_set():
            torch.mm(weights, weights)

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        late = start("late")
        await until(lambda: holds(late, current), "the joiner to hold version 4")
    finally:
        computing.set()
        thread.join(10)


async def test_two_are_served_after_the_third_died_in_the_broadcast(
    publisher: Publisher, start: Any, redis: Any, redis_url: str, run_id: str
) -> None:
    healthy = [start("one"), start("two")]
    doomed = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests/learner/receiver.py"),
        redis_url,
        run_id,
        "doomed",
        "1",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    keys = RunKeys(run_id)
    await announced(redis, keys, "doomed")
    # The broken broadcast ends within its deadline of 15 s. After the dead one's heartbeat has expired, two are left.
    for current in (snapshot(1), snapshot(2)):
        await publisher.publish(current)
        await until(partial(all_hold, healthy, current), f"both to hold version {current.version}", 45)
    assert await asyncio.wait_for(doomed.wait(), 10) == -9
    events = [event for _, event in await EventLog(redis, keys, "test").events()]
    failed = [event.text for event in events if event.phase == "weight-sync-failed" and "doomed" in event.text]
    assert 1 <= len(failed) <= 4, "retries must exclude the dead replica: " + "\n".join(failed)


async def test_a_replica_that_never_answers_is_named_at_the_deadline(redis: Any, run_id: str) -> None:
    keys = RunKeys(run_id)
    settings = WeightsSettings(bucket_mib=1, timeout_s=1.5)
    history = await History.fenced(redis, keys, "learner")
    await put_stub_record(redis, keys)
    publisher = Publisher(redis, keys, EventLog(redis, keys, "learner"), settings, "127.0.0.1", history)
    await publisher.open(snapshot(0).manifest)
    deaf = Receiver(redis, run_id, "deaf")
    try:
        async with Heartbeat(redis, deaf.info):
            seconds = await publisher.publish(snapshot(0))
        assert "forming the group" in await until_event(redis, keys, "weight-sync-failed")
    finally:
        await publisher.close()
    assert 3 <= seconds < 60
    assert "deaf" in await until_event(redis, keys, "weights-late")
