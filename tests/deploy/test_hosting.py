"""Owns the tests of hosting: real Ray and Serve, one session, and a minimal service.

Must not start an engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.hosting.environment import head_environment
from deploy.local.ports import free_ports
from services.contracts import RunState
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import live_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from tests.deploy.echo_service import EchoService, echo
from tests.deploy.hosted_runs import (
    eventually,
    failing_at,
    faults,
    learner_fault,
    submitted,
    until_one_rank,
    with_large_learner,
)
from tests.harness.process_trees import until_gone
from tests.harness.small_run import recipe_document
from tests.services.tracking.following import TrackedRun, step_of
from tests.services.tracking.test_sinks import TensorBoardReader, started

ROOT = Path(__file__).resolve().parents[2]
FAULT = "the optimizer met NaN"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    # Ray's driver runs in this process and emits its own warnings.
    pytest.mark.filterwarnings("ignore"),
]


def failing_learner(rank: int, world: int, master_host: str, master_port: int) -> EchoService:
    """Rank 1 fails, and its error shows its arguments: the test checks that the ranks agree on the address."""
    assert socket.gethostbyname(master_host) == "127.0.0.1"
    return EchoService("learner", f"{FAULT} (rank {rank} of {world})" if rank == 1 else "")


@pytest.fixture(scope="module")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray and Serve, with this process as the driver; yields the runs folder. Afterwards no process is left."""
    runs = tmp_path_factory.mktemp("runs")
    kept = dict(os.environ)
    os.environ.update(head_environment("127.0.0.1", str(runs)) | {"PYTHONPATH": str(ROOT)})
    from deploy.hosting.fleet import start_serve
    from deploy.hosting.session import start_ray, stop_ray

    folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    start_ray(folder, 4, free_ports)
    start_serve()
    started = [process for process in psutil.Process().children(recursive=True) if "ray" in process.name()]
    yield runs
    from ray import serve

    serve.shutdown()
    stop_ray()
    os.environ.clear()
    os.environ.update(kept)
    shutil.rmtree(folder, ignore_errors=True)
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []


@pytest.fixture
async def cluster(
    ray_session: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> AsyncIterator[Any]:
    """A RayCluster with minimal services; the test's run is stopped at the end."""
    from deploy.hosting import factories
    from deploy.hosting.cluster import RayCluster

    for name in ("sampler", "verifier"):
        monkeypatch.setattr(factories, name, partial(echo, name))
    monkeypatch.setattr(factories, "rollout", partial(echo, "rollout", child=True))
    monkeypatch.setattr(factories, "learner", lambda rank, world, host, port: EchoService("learner"))
    cluster = RayCluster(redis_url)
    yield cluster
    await cluster.stop(run_id, 10.0)


@pytest.mark.timeout(300)
async def test_life_of_a_run(cluster: Any, redis: Any, run_id: str, ray_session: Path) -> None:
    record = await submitted(redis, run_id)
    assert await cluster.shortage(record) is None
    await cluster.start(record)
    await cluster.start(record)
    (first,) = await eventually(redis, run_id, "rollout", lambda pids: len(pids) == 1)
    for service in ("sampler", "verifier", "learner"):
        await eventually(redis, run_id, service, lambda pids: len(pids) == 1)
    ends = time.monotonic() + 60
    while (count := len(await live_processes(redis, run_id))) != 4:  # the heartbeat of a stalled process expires
        assert count < 4, "the second start must not start a process again"
        assert time.monotonic() < ends, f"{count} processes"
        await asyncio.sleep(0.1)

    await cluster.scale_rollout(run_id, 2)
    both = await eventually(redis, run_id, "rollout", lambda pids: len(pids) == 2)
    assert both[0] == first
    await cluster.scale_rollout(run_id, 1)
    (left,) = await eventually(redis, run_id, "rollout", lambda pids: len(pids) == 1)
    assert left in both
    drained = [
        event for _, event in await EventLog(redis, RunKeys(run_id), "test").events() if event.phase == "drained"
    ]
    assert [event.service for event in drained] == ["rollout"], "the removed replica must drain"

    (engine,) = psutil.Process(left).children()
    killed = time.monotonic()
    os.kill(left, signal.SIGKILL)
    await until_gone([engine.pid], 60.0)  # an engine without its replica would keep the memory
    (replacement,) = [
        pid for pid in await eventually(redis, run_id, "rollout", lambda pids: bool(set(pids) - {left})) if pid != left
    ]
    print(f"replaced after {time.monotonic() - killed:.1f} s")
    assert await faults(cluster, redis, run_id) == [], "a replaced replica must not be a fault of the run"

    pids = [info.pid for info in await live_processes(redis, run_id) if info.pid != left]
    assert replacement in pids
    began = time.monotonic()
    await cluster.stop(run_id, 60.0)
    await cluster.stop(run_id, 60.0)
    await until_gone(pids, 30.0)
    assert time.monotonic() - began < 20.0, "all processes ended before the deadline"
    assert not [info for info in await live_processes(redis, run_id) if info.pid != left], (
        "all processes drained and withdrew"
    )
    logs = {file.name.split("-")[0] for file in (ray_session / run_id / "logs").iterdir()}
    assert logs == {"sampler", "verifier", "rollout", "learner"}


@pytest.mark.timeout(180)
async def test_a_failed_rank_is_a_fault_and_names_it(
    cluster: Any, redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting import factories

    monkeypatch.setattr(factories, "learner", failing_learner)
    await cluster.start(await submitted(redis, run_id, ranks=2))
    fault = await learner_fault(cluster, run_id)
    assert f"RuntimeError: {FAULT} (rank 1 of 2)" in fault
    assert await faults(cluster, redis, run_id) == [], "the controller must be able to restart the learner"


@pytest.mark.timeout(240)
async def test_killed_processes_recover_never_ready_ones_are_faults(
    cluster: Any, redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting import factories
    from deploy.hosting.actors import actor_state, named_actor

    allowed = 2
    for module in ("nodes.deaths", "roles"):
        monkeypatch.setattr(f"deploy.hosting.{module}.EARLY_DEATHS", allowed)
    monkeypatch.setattr(factories, "verifier", partial(echo, "verifier", fails="no sandbox", gets_ready=False))
    await cluster.start(await submitted(redis, run_id))
    killed: dict[int, float] = {}
    found: set[str] = set()
    ends = time.monotonic() + 120
    while not found or len(killed) < allowed + 2:
        assert time.monotonic() < ends, (killed, found)
        # The cluster counts a death as late only if it has observed the process alive and ready before.
        ready = {info.host_pid for info in await live_processes(redis, run_id) if info.state == "ready"}
        sampler = actor_state(named_actor(f"{run_id}/sampler")).process
        found.update(await cluster.faults(run_id, ready))
        if sampler in ready and sampler[1] not in killed:
            if killed:
                print(f"the sampler was ready {time.monotonic() - max(killed.values()):.1f} s after its kill")
            killed[sampler[1]] = time.monotonic()
            os.kill(sampler[1], signal.SIGKILL)
        await asyncio.sleep(0.1)
    await eventually(redis, run_id, "sampler", lambda pids: bool(set(pids) - killed.keys()))
    found.update(await faults(cluster, redis, run_id))
    assert all(fault.startswith("verifier fleet: ") for fault in found), (
        "a killed sampler that was ready is not a fault"
    )
    counts = re.findall(r"(\d+) replicas in a row died before they were ready", "\n".join(found))
    assert min(map(int, counts)) > allowed


@pytest.mark.timeout(240)
async def test_a_new_gateway_adopts_all_and_restarts_the_learner(
    cluster: Any, redis: Any, redis_url: str, run_id: str
) -> None:
    from deploy.hosting.cluster import RayCluster

    async def pids(service: str, count: int) -> set[int]:
        return set(await eventually(redis, run_id, service, lambda found: len(found) == count))

    record = await submitted(redis, run_id, ranks=2)
    await cluster.start(record)
    services = {"sampler": 1, "verifier": 1, "rollout": 1, "learner": 2}
    before = {service: await pids(service, count) for service, count in services.items()}

    successor = RayCluster(redis_url)
    assert await successor.shortage(record) is None
    await successor.start(record)
    assert await successor.learner_fault(run_id) is None
    assert await faults(successor, redis, run_id) == []
    assert {service: await pids(service, count) for service, count in services.items()} == before
    await successor.scale_rollout(run_id, 2)
    assert await pids("rollout", 2) > before["rollout"]

    # Both ranks are ended at once, although one is stopped by a signal and the other gets no message.
    stopped, killed = sorted(before["learner"])
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    await until_one_rank(run_id)
    third = RayCluster(redis_url)
    await third.start(await RunRecords(redis).scale(run_id, 2))
    assert "died while no gateway was running" in await learner_fault(third, run_id)
    began = time.monotonic()
    await third.restart_learner(record)
    await until_gone([stopped], 60.0)
    restarted = set(await eventually(redis, run_id, "learner", lambda found: len(set(found) - before["learner"]) == 2))
    print(f"the learner was restarted within {time.monotonic() - began:.1f} s")
    assert await third.learner_fault(run_id) is None
    assert {service: await pids(service, 1) for service in ("sampler", "verifier")} == {
        service: before[service] for service in ("sampler", "verifier")
    }

    # A rank dies while its gateway runs, and a sampler hangs.
    os.kill(max(restarted - before["learner"]), signal.SIGKILL)
    assert re.fullmatch(r"learner rank [01]: its process died", await learner_fault(third, run_id))
    [sampler] = before["sampler"]
    os.kill(sampler, signal.SIGSTOP)
    await third.restart_sampler(run_id)
    await eventually(redis, run_id, "sampler", lambda found: bool(set(found) - {sampler}))
    await until_gone([sampler], 30.0)


@pytest.mark.timeout(240)
async def test_an_interrupted_learner_restart_can_be_repeated(
    cluster: Any, redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import GetTimeoutError

    from deploy.hosting import cluster as hosting
    from deploy.hosting import roles

    record = await submitted(redis, run_id, ranks=2)
    await cluster.start(record)
    before = set(await eventually(redis, run_id, "learner", lambda found: len(found) == 2))

    async def is_interrupted(error: type[Exception], record: RunRecord = record) -> None:
        with pytest.raises(error):
            await cluster.restart_learner(record)
        assert await cluster.learner_fault(run_id) == hosting.RESTART_UNFINISHED, "the restart is unfinished"

    # Before and after the kill, before the placement, and before the ranks are started.
    for name, call in (
        ("named_actors", 1),
        ("named_actors", 2),
        ("release_placement", 1),
        ("learner_placement", 1),
        ("Rank", 2),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(roles, name, failing_at(call, getattr(roles, name)))
            await is_interrupted(GetTimeoutError)
    await until_gone(list(before), 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(roles, "KILLED_S", -1.0)
        patched.setattr(roles, "named_actors", lambda prefix: [f"{prefix}0"])
        await is_interrupted(TimeoutError)
    # The ranks cannot be placed; the next call replaces those that still wait for a placement.
    await is_interrupted(hosting.PlacementError, with_large_learner(record))

    await cluster.restart_learner(record)
    assert await cluster.learner_fault(run_id) is None
    await eventually(redis, run_id, "learner", lambda found: len(set(found) - before) == 2)

    # A controller that resumes a placed run scales the fleet to the current number of replicas.
    await cluster.start(await RunRecords(redis).scale(run_id, 2))
    await eventually(redis, run_id, "rollout", lambda found: len(found) == 2)


@pytest.mark.timeout(240)
async def test_a_hanging_replica_is_replaced_although_serve_died(
    cluster: Any, redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from deploy.hosting import fleet
    from deploy.hosting.actors import actor_state

    assert 3 * (fleet.HEALTH_TIMEOUT_S + fleet.HEALTH_PERIOD_S) < 40
    monkeypatch.setattr(fleet, "HEALTH_TIMEOUT_S", 3.0)
    await cluster.start(await submitted(redis, run_id))
    (stopped,) = await eventually(redis, run_id, "verifier", lambda pids: len(pids) == 1)
    serve = actor_state(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"))
    assert serve.process is not None
    os.kill(serve.process[1], signal.SIGKILL)
    assert await faults(cluster, redis, run_id) == []
    await cluster.scale_rollout(run_id, 2)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    await eventually(redis, run_id, "verifier", lambda pids: bool(set(pids) - {stopped}))
    print(f"replaced {time.monotonic() - began:.1f} s after it stopped")
    await until_gone([stopped], 60.0)
    await eventually(redis, run_id, "rollout", lambda pids: len(pids) == 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("rollout_steps", "cpus"), [(3, 3.5), (0, 4.5)])
async def test_shortage_names_needed_and_free_resources(
    cluster: Any, redis: Any, run_id: str, rollout_steps: int, cpus: float
) -> None:
    # A run without rollout steps only evaluates, and requests no resources for a learner.
    document = recipe_document(
        "/nowhere",
        rollout={"cpus": cpus},
        learner={"cpus": 1.0},
        verifier={"cpus": 0.0},
        limits={"rollout_steps": rollout_steps},
    )
    record = await RunRecords(redis).create(run_id, parse_recipe(document))
    assert record.state is RunState.QUEUED
    shortage = await cluster.shortage(record)
    assert re.fullmatch(r"needs 4\.5 CPUs; the cluster has 4, and [0-4](\.\d+)? are free", shortage), shortage


@pytest.mark.timeout(180)
async def test_a_prepared_model_is_a_path_a_missing_one_an_error(
    cluster: Any, redis: Any, run_id: str, tiny_model: Path
) -> None:
    records = RunRecords(redis)
    there = await records.create(run_id, parse_recipe(recipe_document(tiny_model)))
    assert await cluster.prepare_model(there) == str(tiny_model)
    absent = await records.create(f"{run_id}-absent", parse_recipe(recipe_document("/nowhere")))
    with pytest.raises(ValueError, match=r"^model\.path: '/nowhere' is not valid: expected .*; no such folder"):
        await cluster.prepare_model(absent)


def write_pid_and_sleep(path: str, _: float) -> None:
    """Preparation that takes too long."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.timeout(180)
async def test_preparation_that_takes_too_long_is_ended(
    cluster: Any, redis: Any, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting.nodes import preparing as module

    monkeypatch.setattr(module, "PREPARE_S", 20.0)
    document = recipe_document("/nowhere", limits={"startup_timeout_s": 20.0})
    record = await RunRecords(redis).create(run_id, parse_recipe(document))
    with pytest.raises(TimeoutError, match=r"^preparation has not ended within 20 s \(limits\.startup_timeout_s, at "):
        await module.on_a_node(record, write_pid_and_sleep, str(tmp_path / "pid"))
    await until_gone([int((tmp_path / "pid").read_text())], 60)


@pytest.mark.parametrize(("reward", "role"), [("code", "verifier-code"), ("math", "verifier")])
@pytest.mark.timeout(300)
async def test_programs_are_judged_on_nodes_of_their_own(
    cluster: Any, redis: Any, run_id: str, reward: str, role: str
) -> None:
    from deploy.hosting.ray_internals import serve_applications

    data = {"source": "jsonl", "path": "/nowhere.jsonl", "layout": "fields", "verifier": reward}
    booked = {"cpus": 0.1}
    document = recipe_document("/nowhere", data=data, rollout=booked, verifier=booked, limits={"rollout_steps": 0})
    await cluster.start(await RunRecords(redis).create(run_id, parse_recipe(document)))
    await eventually(redis, run_id, "verifier", lambda pids: len(pids) == 1, 150.0)
    for fleet, taken in (("verifier", role), ("rollout", "rollout")):
        deployment = serve_applications(20.0)[f"{run_id}.{fleet}"]["deployments"][fleet]
        options = deployment["deployment_config"]["ray_actor_options"]
        assert options["resources"] == {f"penstock-{taken}": 1.0}


@pytest.mark.timeout(180)
async def test_a_model_that_does_not_fit_is_refused_by_the_chart(
    cluster: Any, redis: Any, run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = recipe_document(tiny_model, rollout={"gpus": 1.0}, learner={"gpus": 1.0})
    await RunRecords(redis).create(run_id, parse_recipe(document))
    record = replace(await RunRecords(redis).get(run_id), model_path=str(tiny_model))
    role, path = {"pods": 1, "cpus": 4, "gpus": 1}, tmp_path / "bounds.json"
    monkeypatch.setenv("PENSTOCK_BOUNDS", str(path))
    for gib in (None, 8):
        path.write_text(
            json.dumps(dict.fromkeys(("cpu", "verifier", "rollout", "learner"), role | {"gpu_memory_gib": gib}))
        )
        await cluster.check_memory(record)
    path.write_text(
        json.dumps(dict.fromkeys(("cpu", "verifier", "rollout", "learner"), role | {"gpu_memory_gib": 1e-4}))
    )
    with pytest.raises(
        RuntimeError, match=r"^learner\.zero_stage: .* is not valid: .*; rollout\.\w+: .*`penstock plan`"
    ):
        await cluster.check_memory(record)
    path.write_text("{")
    await cluster.check_memory(record)
    recipe = recipe_document(tiny_model, rollout={"gpus": 3.0, "tensor_parallel": 3}, learner={"gpus": 1.0})
    shared = replace(record, stored_recipe=parse_recipe(recipe).model_dump_json().encode())
    with pytest.raises(RuntimeError, match=r"^rollout\.tensor_parallel: 3 is not valid: expected a divisor of \d+, "):
        await cluster.check_memory(shared)


@pytest.mark.timeout(180)
async def test_a_run_larger_than_the_only_machine_is_refused(
    cluster: Any, redis: Any, run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not with a chart, which adds nodes."""
    document = recipe_document(tiny_model, rollout={"kv_cache_mib": 8 * 2**20})
    await RunRecords(redis).create(run_id, parse_recipe(document))
    record = replace(await RunRecords(redis).get(run_id), model_path=str(tiny_model))
    with pytest.raises(RuntimeError, match=r"^model\.path: .* the only machine; .*KV caches 8192\.00"):
        await cluster.check_memory(record)
    bounds = {role: {"pods": 1, "cpus": 4, "gpus": 0} for role in ("cpu", "verifier", "rollout", "learner")}
    (tmp_path / "bounds.json").write_text(json.dumps(bounds))
    monkeypatch.setenv("PENSTOCK_BOUNDS", str(tmp_path / "bounds.json"))
    await cluster.check_memory(record)


def test_no_serve_proxy_uses_a_port(ray_session: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 8000))


async def test_a_killed_tracker_is_replaced_and_is_no_fault(
    cluster: Any, redis: Any, run_id: str, ray_session: Path
) -> None:
    booked = {"cpus": 0.1}
    document = recipe_document("/nowhere", rollout=booked, verifier=booked, learner=booked, tracking=["tensorboard"])
    await cluster.start(await RunRecords(redis).create(run_id, parse_recipe(document)))
    run = TrackedRun(redis, "", await RunRecords(redis).get(run_id))
    [pid] = await eventually(redis, run_id, "tracker", lambda pids: len(pids) == 1)
    await run.until(lambda: run.events("tracking-started"), "the sink")
    await run.append(step_of(1))
    os.kill(pid, signal.SIGKILL)
    await eventually(redis, run_id, "tracker", lambda pids: bool(set(pids) - {pid}))
    await run.append(step_of(2))
    await run.until(lambda: started(run, 2), "the sink of the second tracker")
    assert await faults(cluster, redis, run_id) == []
    await cluster.stop(run_id, 12.0)
    assert TensorBoardReader(ray_session / run_id).curve("loss") == [(1, 0.1), (2, 0.2)]
