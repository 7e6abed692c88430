"""Owns the tests of what a process does about its place: it ends when its device must go, and is shown where it failed.

Must not start Ray; test_avoided_places.py does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.process.hosting import host_service
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.runs.places import AVOIDED, AVOIDED_S, AvoidedPlace, Location, avoid, avoided_places
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import RunRecords
from tests.deploy.echo_service import EchoService
from tests.deploy.fake_nvml import Device, Event, FakeDriver
from tests.harness.small_run import recipe_document

# Ray, which hosting imports, emits its own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Location("gpu-node", "GPU-a")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    from deploy.hosting.nodes import devices, placed

    found = FakeDriver([Device("GPU-a")])
    monkeypatch.setitem(sys.modules, devices.LIBRARY, found.module())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(placed, "own_place", lambda: (HERE, "ray-node"))
    monkeypatch.setattr(placed, "LOOK_S", 0.05)
    monkeypatch.setattr(placed, "WATCH_S", 0.05)
    yield found
    assert not driver_left(found), found.calls


def driver_left(driver: FakeDriver) -> bool:
    return driver.calls.count("init") != driver.calls.count("shutdown")


class Hosted:
    """An echo service in its place, hosted in this process."""

    def __init__(self, redis: Any, redis_url: str, run: str) -> None:
        self.redis, self.redis_url, self.run, self.keys = redis, redis_url, run, RunKeys(run)
        self.stopping = asyncio.Event()

    async def __aenter__(self) -> Hosted:
        from deploy.hosting.nodes.placed import placed

        service = placed(lambda: EchoService("rollout"))
        self.task = asyncio.create_task(host_service(service, self.run, self.redis_url, self.stopping))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping.set()
        with suppress(Exception):
            await asyncio.wait_for(self.task, 20)

    async def until_state(self, state: str) -> None:
        ends = time.monotonic() + 20
        while [process.state for process in await live_processes(self.redis, self.run)] != [state]:
            assert time.monotonic() < ends, await live_processes(self.redis, self.run)
            await asyncio.sleep(0.02)


@pytest.fixture
async def submitted(redis: Any, run_id: str) -> str:
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/nowhere")))
    return run_id


def errors(kind: str) -> float | None:
    labels = {"node": HERE.node, "device": HERE.device, "kind": kind}
    return REGISTRY.get_sample_value("penstock_gpu_errors_total", labels)


async def test_a_device_that_must_go_ends_its_process(
    driver: FakeDriver, redis: Any, redis_url: str, submitted: str
) -> None:
    from deploy.hosting.nodes.placed import DeviceFailedError

    async with Hosted(redis, redis_url, submitted) as hosted:
        await hosted.until_state("ready")
        before = errors("xid") or 0.0
        driver.events = [Event(driver.devices[0], 31)]
        ends = time.monotonic() + 20
        while errors("xid") != before + 1:
            assert time.monotonic() < ends
            await asyncio.sleep(0.02)
        await hosted.until_state("ready")
        assert errors("ecc") == errors("remap") == 0.0, "shown before the first one"

        driver.events = [Event(driver.devices[0], 79)]
        with pytest.raises(DeviceFailedError, match="node gpu-node, device GPU-a: GPU-a: Xid 79: the GPU has fallen"):
            await asyncio.wait_for(hosted.task, 20)
    [place] = await avoided_places(redis, hosted.keys)
    assert (place.service, place.place, place.kind, place.ray_node) == ("rollout", HERE, "xid", "ray-node")
    events = [event for _, event in await EventLog(redis, hosted.keys, "test").events()]
    assert [event.phase for event in events] == ["node-avoided", "service-failed"]
    assert "rollout avoids node gpu-node, device GPU-a until" in events[0].text


async def test_a_replica_holds_a_place_until_it_is_no_longer_avoided(
    driver: FakeDriver, redis: Any, redis_url: str, submitted: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting.pod_registry import VARIABLE, PodRegistry

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    place = AvoidedPlace(
        service="rollout", node=HERE.node, device=HERE.device, count=3, reason="died", until=time.time() + AVOIDED_S
    )
    registry = PodRegistry(tmp_path)
    for ray_node, ends in (("another pod's node", False), ("ray-node", True)):
        await avoid(redis, RunKeys(submitted), place.model_copy(update={"ray_node": ray_node}))
        async with Hosted(redis, redis_url, submitted) as hosted:
            await hosted.until_state(AVOIDED)
            assert (registry.end_reason() is not None) == ends, "only the pod in which the place failed is replaced"
            assert driver.calls == [], "nothing runs on the device"
            await redis.hdel(hosted.keys.places, place.name)
            await hosted.until_state("ready")
            assert registry.end_reason() is None
        driver.calls.clear()


async def test_places_of_other_services_and_devices_are_used(
    driver: FakeDriver, redis: Any, redis_url: str, submitted: str
) -> None:
    until = time.time() + AVOIDED_S
    for service, node, device, ends in (
        ("verifier", HERE.node, HERE.device, until),
        ("rollout", HERE.node, "GPU-b", until),
        ("rollout", HERE.node, HERE.device, time.time() - 1),
    ):
        place = AvoidedPlace(service=service, node=node, device=device, count=3, reason="died", until=ends)
        await avoid(redis, RunKeys(submitted), place)
    async with Hosted(redis, redis_url, submitted) as hosted:
        await hosted.until_state("ready")
    assert [place.place for place in await avoided_places(redis, hosted.keys)] == [
        Location(HERE.node, "GPU-b"),
        HERE,
    ], "the time of one of them is over, of the same place for another service it is not"
    assert len(await redis.hkeys(hosted.keys.places)) == 3, "a read deletes nothing"


async def test_without_a_driver_nothing_is_watched_and_all_works(
    driver: FakeDriver, redis: Any, redis_url: str, submitted: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.deploy.fake_nvml import NVMLError_LibraryNotFound

    driver.initial = NVMLError_LibraryNotFound()
    async with Hosted(redis, redis_url, submitted) as hosted:
        await hosted.until_state("ready")
    assert hosted.task.exception() is None
    said = [entry.getMessage() for entry in caplog.records if "are not watched" in entry.getMessage()]
    assert said == [
        "errors of node gpu-node, device GPU-a are not watched: no NVIDIA driver (libnvidia-ml.so.1 is missing, or its "
        "kernel module is not loaded)"
    ]
    driver.calls.clear()
