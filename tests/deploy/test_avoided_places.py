"""Owns the tests of places that fail: several nodes of a real Ray, of which a device or a node ends what runs there.

Must not start an engine, nor need a GPU: Ray is told that there are some.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.hosting.environment import GPU_LABEL, NODE_LABEL, head_environment, place, serving
from services.contracts import ProcessInfo
from services.controller.fleet.scaling import FleetScaling
from services.controller.health import HealthMonitor
from services.controller.retry import RunFailedError
from services.controller.run_context import RunContext
from services.process.hosting import Context
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.runs.places import AVOIDED, AVOIDED_S, AvoidedPlace, avoided_places
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import RunRecords
from tests.deploy.echo_service import EchoService, echo
from tests.harness.small_run import recipe_document

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    # Ray's driver runs in this process and emits its own warnings.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]


class PlacedEcho(EchoService):
    """Ends its process before it is ready where `bad` is its place, like an engine on a broken device."""

    def __init__(self, name: str, bad: str) -> None:
        super().__init__(name)
        self._bad = bad

    async def run(self, context: Context) -> None:
        from deploy.hosting.nodes.places import own_place

        here, _ = own_place()
        if self._bad in str(here):
            await asyncio.sleep(1.0)
            os._exit(1)
        await super().run(context)


def placed_echo(name: str, bad: str) -> PlacedEcho:
    return PlacedEcho(name, bad)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Machine `a` with two GPUs and `b` with one for rollout; `c` and `d` for the learner; the head for the rest."""
    kept = dict(os.environ)
    os.environ.update(head_environment("127.0.0.1", str(tmp_path_factory.mktemp("runs"))) | {"PYTHONPATH": str(ROOT)})
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from deploy.hosting.environment import NAMESPACE
    from deploy.hosting.fleet import start_serve

    cluster = Cluster()
    try:
        for name, cpus, gpus, roles in (
            ("head", 2, 0, ("head", "cpu", "verifier")),
            ("a", 2, 2, ("rollout",)),
            ("b", 2, 1, ("rollout",)),
            ("c", 1, 1, ("learner",)),
            ("d", 1, 1, ("learner",)),
        ):
            uuids = {f"{GPU_LABEL}{number}": str(number) for number in range(gpus)}
            os.environ["RAY_OVERRIDE_LABELS"] = json.dumps({NODE_LABEL: name} | uuids)
            cluster.add_node(num_cpus=cpus, num_gpus=gpus, resources=serving(*roles), object_store_memory=80_000_000)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        start_serve()
        yield
        serve.shutdown()
        ray.shutdown()
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(kept)


class Followed:
    """A run on these nodes, with the parts of a controller that look after its processes."""

    def __init__(self, redis: Any, cluster: Any, run: str, folder: Path, **sections: Any) -> None:
        self.redis, self.cluster, self.run = redis, cluster, run
        self._document = recipe_document("/nowhere", **sections)
        self._context = RunContext(redis, RunRecords(redis), cluster, folder, run, asyncio.Event())

    async def start(self) -> None:
        self.record = await RunRecords(self.redis).create(self.run, parse_recipe(self._document))
        self._fleet = FleetScaling(self._context)
        context = self._context
        self.health = HealthMonitor(self.redis, self.cluster, context.event_log, context.waits, self.record)
        await self.cluster.start(await self._fleet.set_initial(self.record, []))

    async def until(self, holds: Callable[[list[ProcessInfo]], bool], what: str) -> list[ProcessInfo]:
        """Look after the run's processes, like its controller, until they satisfy `holds`."""
        ends = time.monotonic() + DEADLINE_S
        while True:
            found = await live_processes(self.redis, self.run)
            if holds(found):
                return found
            assert time.monotonic() < ends, f"{what}: {found}\n{await self.events()}"
            await self.look(found)
            await asyncio.sleep(0.3)

    async def look(self, found: list[ProcessInfo]) -> None:
        await self.health.check(self.record, found)
        await self._fleet.scale(self.record, found)

    async def events(self, phase: str = "") -> list[str]:
        events = await EventLog(self.redis, RunKeys(self.run), "test").events()
        return [f"{event.phase}: {event.text}" for _, event in events if phase in ("", event.phase)]


@pytest.fixture
async def cluster(nodes: None, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    from deploy.hosting import factories
    from deploy.hosting.cluster import RayCluster

    for name in ("sampler", "verifier"):
        monkeypatch.setattr(factories, name, partial(echo, name))
    cluster = RayCluster(redis_url)
    yield cluster
    await cluster.stop(run_id, 10.0)


def in_state(found: list[ProcessInfo], service: str, state: str) -> int:
    return sum(process.service == service and process.state == state for process in found)


ROLLOUT = {"cpus": 0.1, "gpus": 1.0}
NO_TRAINING = {"limits": {"rollout_steps": 0}, "verifier": {"cpus": 0.1}}


async def test_a_bad_device_costs_one_replica(
    cluster: Any, redis: Any, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting import factories

    monkeypatch.setattr(factories, "rollout", partial(placed_echo, "rollout", "node a, device 1"))
    run = Followed(redis, cluster, run_id, tmp_path, rollout=ROLLOUT | {"replicas": 3}, **NO_TRAINING)
    await run.start()
    await run.until(lambda found: in_state(found, "rollout", AVOIDED) == 1, "a replica that holds the bad device")
    await run.look(await run.until(lambda found: in_state(found, "rollout", "ready") == 2, "the fleet of N - 1"))
    [event] = await run.events("node-avoided")
    assert "rollout avoids node a, device 1 until" in event
    assert "(3 failed there: died before they were ready" in event
    assert any("hold avoided places; 4 are requested instead of 3" in text for text in await run.events("scaling"))

    # The next controller knows the place, and a place whose time is over is tried again.
    [avoided] = await avoided_places(redis, RunKeys(run_id))
    assert tuple(avoided.place) == ("a", "1")
    await redis.delete(RunKeys(run_id).places)
    await run.until(lambda found: in_state(found, "rollout", AVOIDED) == 0, "another try")
    await run.until(lambda found: in_state(found, "rollout", AVOIDED) == 1, "the place to be avoided again")
    assert len(await run.events("node-avoided")) == 2


async def test_a_recipe_that_fails_everywhere_ends_the_run(
    cluster: Any, redis: Any, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.hosting import factories

    monkeypatch.setattr(factories, "rollout", partial(placed_echo, "rollout", "node"))
    run = Followed(redis, cluster, run_id, tmp_path, rollout=ROLLOUT | {"replicas": 3}, **NO_TRAINING)
    await run.start()
    with pytest.raises(
        RunFailedError, match=r"^rollout fleet: \d+ replicas in a row died .*at node a, device [01];.*at node b"
    ):
        await run.until(lambda found: False, "the failure")


async def test_ranks_return_to_an_avoided_node_if_others_use_the_rest(
    cluster: Any, redis: Any, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from deploy.hosting import factories

    monkeypatch.setattr(factories, "rollout", partial(echo, "rollout"))
    monkeypatch.setattr(factories, "learner", lambda rank, world, host, port: echo("learner"))
    sections = {"rollout": {"cpus": 0.1}, "verifier": {"cpus": 0.1}, "learner": {"cpus": 0.1, "gpus": 1.0}}
    run = Followed(redis, cluster, run_id, tmp_path, limits={"startup_timeout_s": 30.0}, **sections)
    other = ray.remote(EchoService).options(num_cpus=0, num_gpus=1, resources=place("learner"), label_selector=ON_D)
    holder = other.remote("holder")
    await asyncio.wrap_future(holder.__ray_ready__.remote().future())
    until = time.time() + AVOIDED_S
    await cluster.avoid(run_id, [AvoidedPlace(service="learner", node="c", count=3, reason="failed", until=until)])
    await run.start()
    assert learner_node(run_id) == "c"
    ray.kill(holder)


async def test_ranks_leave_a_node_that_keeps_failing(
    cluster: Any, redis: Any, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from deploy.hosting import factories

    monkeypatch.setattr(factories, "rollout", partial(echo, "rollout"))
    monkeypatch.setattr(factories, "learner", lambda rank, world, host, port: placed_echo("learner", "node c"))
    sections = {"rollout": {"cpus": 0.1}, "verifier": {"cpus": 0.1}, "learner": {"cpus": 0.1, "gpus": 1.0}}
    run = Followed(redis, cluster, run_id, tmp_path, **sections)
    # Until it is avoided, the broken node is the only one with room.
    other = ray.remote(EchoService).options(num_cpus=0, num_gpus=1, resources=place("learner"), label_selector=ON_D)
    holder = other.remote("holder")
    await asyncio.wrap_future(holder.__ray_ready__.remote().future())
    await run.start()
    assert learner_node(run_id) == "c"
    releasing = asyncio.create_task(release(run, holder))
    await run.until(lambda found: in_state(found, "learner", "ready") == 1, "the other node")
    await releasing
    assert learner_node(run_id) == "d"
    [event] = await run.events("node-avoided")
    assert "learner avoids node c until" in event
    assert "(3 failed there: ranks failed" in event
    assert len(await run.events("learner-restarted")) == 3


ON_D = {"penstock.dev/node": "d"}


async def release(run: Followed, holder: Any) -> None:
    """End the actor that takes the other node's room, once the broken node is avoided."""
    import ray

    ends = time.monotonic() + DEADLINE_S
    while not await run.events("node-avoided"):
        assert time.monotonic() < ends
        await asyncio.sleep(0.2)
    ray.kill(holder)


def learner_node(run: str) -> str:
    import ray

    names = {node["NodeID"]: node["Labels"].get("penstock.dev/node") for node in ray.nodes()}
    group = ray.util.placement_group_table(ray.util.get_placement_group(f"{run}/learner"))
    [node] = group["bundles_to_node_id"].values()
    return str(names[node])
