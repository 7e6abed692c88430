"""Owns the tests of GPU errors: what is read, after which errors the device must go, and a machine without a driver.

Must not need a GPU; a fake driver has the errors, and the real binding finds no library.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deploy.hosting.nodes import devices
from deploy.hosting.nodes.devices import FATAL_XIDS, DevicesUnreadableError, DeviceWatch, driver_problem, gpu_uuids
from deploy.hosting.pod_registry import VARIABLE
from deploy.kubernetes import node_facts
from services.streams.keys import NODE_PROBLEMS
from services.streams.runs.node_problems import SHOWN_S, node_problems, report_node
from tests.deploy.fake_nvml import (
    Device,
    Event,
    FakeDriver,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_LibraryNotFound,
)
from tests.harness.each import each
from tests.harness.free_ports import free_port

OPERATIONS = Path(__file__).parents[2] / "docs/operations"
EXPECTED = "expected NVIDIA driver R580 or newer (CUDA 13) and 2 GPUs"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver([Device("GPU-a"), Device("GPU-b")])
    monkeypatch.setitem(sys.modules, devices.LIBRARY, found.module())
    return found


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real binding, of which Ray has a copy; nvidia-ml-py itself is only in the GPU image."""
    from ray._private.thirdparty import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        monkeypatch.setitem(sys.modules, devices.LIBRARY, pynvml)
        return pynvml
    pynvml.nvmlShutdown()
    pytest.skip("this machine has an NVIDIA driver")


def test_errors_are_read_once_and_some_of_them_are_fatal(driver: FakeDriver) -> None:
    a, b = driver.devices
    watch = DeviceWatch(["1", "GPU-a"])
    assert (a.registered, b.registered) == (8, 8)
    assert watch.look(0.01) == []

    for xid, fatal in ((31, False), (63, False), (94, False), (48, True), (79, True), (95, True), (119, True)):
        driver.events = [Event(b, xid)]
        [fault] = watch.look(5.0)
        assert (fault.device, fault.kind, fault.fatal) == ("GPU-b", "xid", fatal), xid
        assert fault.text.startswith(f"GPU-b: Xid {xid}: ")
    driver.events = [Event(b, 1, eventType=2)]
    assert watch.look(0.01) == [], "another kind of event"

    a.ecc = 3
    [fault] = watch.look(0.01)
    assert fault[:3] == ("GPU-a", "ecc", "GPU-a: 3 uncorrected ECC errors, 3 since the driver started")
    assert not fault.fatal
    assert watch.look(0.01) == []

    a.rows = (0, 2, 1, 0)
    [fault] = watch.look(0.01)
    assert (fault.kind, fault.fatal) == ("remap", False)
    assert watch.look(0.01) == [], "a reset is still needed"
    a.rows = (0, 2, 1, 1)
    [fault] = watch.look(0.01)
    assert (fault.kind, fault.fatal) == ("remap", True)

    a.rows = (0, 0, 0, 0)
    b.lost = True
    [fault] = watch.look(0.01)
    assert (fault.device, fault.kind, fault.fatal) == ("GPU-b", "xid", True)
    watch.close()
    assert driver.calls == ["init", "events", "free", "shutdown"]


def test_devices_that_count_nothing_are_watched_for_the_rest(driver: FakeDriver) -> None:
    driver.devices[0].ecc = driver.devices[0].rows = None
    watch = DeviceWatch(["0"])
    driver.events = [Event(driver.devices[0], 79)]
    [fault] = watch.look(1.0)
    assert fault.text == "GPU-a: Xid 79: the GPU has fallen off the bus"


def test_events_that_cannot_be_read_do_not_spin(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.broken = NVMLError("Unknown Error")
    watch = DeviceWatch(["0"])
    wait_s = 0.2
    for _ in range(3):
        before = time.monotonic()
        assert watch.look(wait_s) == []
        assert time.monotonic() - before >= wait_s
    said = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert said == ["events of devices cannot be read: Unknown Error"], "once"
    driver.devices[0].ecc = 1
    [fault] = watch.look(60.0)
    assert fault.kind == "ecc", "the rest is watched"
    before = driver.waits
    threading.Thread(target=watch.look, args=(3600.0,), daemon=True).start()
    ends = time.monotonic() + 20
    while driver.waits == before:
        assert time.monotonic() < ends
        time.sleep(0.01)
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive(), "a close ends the wait"

    driver.waits = 0
    driver.devices[1].reports = False
    silent = DeviceWatch(["1"])
    silent.look(0.01)
    silent.close()
    assert driver.waits == 0, "no device reports events"


def test_documents_name_the_errors_after_which_a_gpu_must_go() -> None:
    first, last = list(FATAL_XIDS)[:-1], list(FATAL_XIDS)[-1]
    listed = f"Xids {', '.join(map(str, first))} and {last}"
    for name in ("recovery.md", "runbooks/kubernetes/GpuXid.md"):
        text = " ".join((OPERATIONS / name).read_text().split())
        assert listed in text, name


PROBLEMS: dict[str, tuple[FakeDriver, str | None]] = {
    "a node that can": (FakeDriver([Device("GPU-a"), Device("GPU-b")]), None),
    "newer than needed": (FakeDriver([Device("GPU-a"), Device("GPU-b")], "620.1", 14010), None),
    "an old driver": (FakeDriver([Device("GPU-a")], "570.86.15", 12080), "driver 570.86.15 supports CUDA 12.8"),
    "slices of one GPU": (FakeDriver([Device("GPU-a")]), None),
    "no device": (FakeDriver([]), "the pod sees no GPU"),
    "no library": (FakeDriver([], initial=NVMLError_LibraryNotFound()), "no NVIDIA driver (libnvidia-ml.so.1 is"),
    "no module": (FakeDriver([], initial=NVMLError_DriverNotLoaded()), "or its kernel module is not loaded)"),
    "anything else": (FakeDriver([], initial=NVMLError("Insufficient Permissions")), "NVML: Insufficient Permissions"),
}


@each("name", PROBLEMS)
def test_a_node_that_cannot_run_gpu_processes_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    driver, problem = PROBLEMS[name]
    monkeypatch.setitem(sys.modules, devices.LIBRARY, driver.module())
    found = driver_problem(2)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert problem in found
        assert found.startswith("this node cannot run GPU processes: ")
        assert found.endswith(EXPECTED)
        assert "\n" not in found
    assert driver.calls == (["init"] if driver.initial else ["init", "shutdown"])


def test_the_real_library_is_missing_without_a_driver(real: ModuleType) -> None:
    missing = "no NVIDIA driver (libnvidia-ml.so.1 is missing, or its kernel module is not loaded)"
    with pytest.raises(DevicesUnreadableError) as error:
        DeviceWatch(["0"])
    assert str(error.value) == missing
    with pytest.raises(DevicesUnreadableError):
        gpu_uuids()
    assert driver_problem(2) == f"this node cannot run GPU processes: {missing}: {EXPECTED}"
    names = [name for name in dir(FakeDriver) if name.startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == [], "the fake has functions that the binding lacks"


def test_a_node_is_named_and_its_gpus_too(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node_facts.LABELS, raising=False)
    assert node_facts.label_variables() == {}
    assert node_facts.gpu_problem() is None, "a pod without GPUs needs no driver"
    monkeypatch.setenv(node_facts.NODE, "gpu-node-7")
    monkeypatch.setenv(node_facts.GPUS, "2")
    assert node_facts.label_variables()[node_facts.LABELS] == (
        '{"penstock.dev/node": "gpu-node-7", "penstock.dev/gpu-0": "GPU-a", "penstock.dev/gpu-1": "GPU-b"}'
    )
    assert node_facts.gpu_problem() is None
    del driver.devices[1]
    assert json.loads(node_facts.label_variables()[node_facts.LABELS]) == {"penstock.dev/node": "gpu-node-7"}, (
        "slices of GPUs have no names of their own"
    )


async def test_a_pod_without_driver_says_so_and_starts_nothing(redis: Any, redis_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.kubernetes.node", "--role", "rollout", "--probe-port", str(free_port())]
    own = {
        VARIABLE: str(tmp_path / "pod"),
        "PENSTOCK_GPUS": "2",
        "PENSTOCK_NODE": "no-driver",
        "PENSTOCK_REDIS": redis_url,
    }
    with (tmp_path / "log").open("w") as output:
        pod = await asyncio.create_subprocess_exec(*command, env=os.environ | own, stdout=output, stderr=output)
    try:
        ends = time.monotonic() + 60
        while not (found := [each for each in await node_problems(redis, ["rollout"]) if each.node == "no-driver"]):
            assert time.monotonic() < ends, (tmp_path / "log").read_text()
            await asyncio.sleep(0.1)
        assert str(found[0]).startswith("rollout: node no-driver: this node cannot run GPU processes: ")
        pod.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(pod.wait(), 20) == 1
    finally:
        with suppress(ProcessLookupError):
            pod.kill()
    said = f"{found[0].text}; this pod ends in 60 s"
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition("__main__: ")[2] for line in lines] == [said]


async def test_problems_of_nodes_are_shown_for_a_while(
    redis: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await report_node(redis_url, "learner", "n", "no driver")
    assert [str(each) for each in await node_problems(redis, ["learner"])] == ["learner: node n: no driver"]
    assert await node_problems(redis, ["cpu"]) == [], "of another role"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + SHOWN_S + 1)
    assert await node_problems(redis, ["learner"]) == []
    assert await redis.hexists(NODE_PROBLEMS, "learner n"), "a read deletes nothing"
    assert 0 < await redis.ttl(NODE_PROBLEMS) <= SHOWN_S


async def test_without_redis_the_problem_is_only_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.streams.runs.node_problems.REPORT_S", 0.2)
    await report_node(f"redis://127.0.0.1:{free_port()}/0", "learner", "n", "no driver")
    assert "the problem of this node could not be reported to runs" in caplog.text
