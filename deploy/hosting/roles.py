"""Owns a run's single processes: sampler, tracker and learner ranks, each one a named Ray actor.

Must not restart a single learner rank: either all ranks are restarted, or none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.hosting import factories
from deploy.hosting.actors import Restarts, actor_state, named_actor, named_actors
from deploy.hosting.environment import NAMESPACE, place, service_environment
from deploy.hosting.hosted_service import HostedService, free_address
from deploy.hosting.nodes.deaths import EARLY_DEATHS
from deploy.hosting.nodes.placed import placed
from deploy.hosting.ray_internals import actor_id
from services.contracts import HostPid
from services.process.hosting import Service
from services.streams.state.run_record import RunRecord

log = logging.getLogger(__name__)

UNLIMITED = -1
POLL_S = 0.2
KILLED_S = 20.0
PROBE_S = 5.0
DIED = "its process died"
TRACKER_RESTARTS = 100
"""A tracker whose process keeps dying stays away, and the run continues without it."""
TRACKER_STOP_S = 7.0
"""How long the end of a run waits for its tracker, which drains in less (services.tracking.service)."""


class RoleError(RuntimeError):
    """A role's service cannot be started. The text is one line."""


class RoleActor:
    """One actor that hosts one service. It exists before its service, so that ranks can first agree on an address."""

    def __init__(self, exit_on_fault: bool, start_with: tuple[Callable[[], Service], str, str] | None = None) -> None:
        self._exit_on_fault = exit_on_fault
        self._hosted: HostedService | None = None
        self._address: tuple[str, int] | None = None
        if start_with:
            self.start(*start_with)

    def start(self, make: Callable[[], Service], run: str, redis_url: str) -> None:
        """Start the service, unless it was started already."""
        if self._hosted is None:
            self._hosted = HostedService(make, run, redis_url, exit_on_fault=self._exit_on_fault)

    def address(self) -> tuple[str, int]:
        """A host and port of this actor's machine that was free at the first call; the same at each call."""
        self._address = self._address or free_address()
        return self._address

    def fault(self) -> str | None:
        """One line when the service failed, else None."""
        return self._hosted.fault() if self._hosted else None

    def stop(self, deadline_s: float) -> bool:
        """Drain the service; returns whether it ended in time."""
        return self._hosted.stop(deadline_s) if self._hosted else True


async def _result(reference: Any, deadline_s: float) -> Any:
    """The value of an object reference. Raises TimeoutError, RayError."""
    async with asyncio.timeout(deadline_s):
        return await asyncio.wrap_future(reference.future())


class RoleHandle:
    """A handle of one named actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    def kill(self) -> None:
        """End the actor at once, without a restart. If a signal has stopped its process, that takes about 5 s."""
        ray.kill(self._actor, no_restart=True)

    async def stop(self, deadline_s: float) -> None:
        """Drain, then end the actor."""
        try:
            await _result(self._actor.stop.remote(deadline_s), deadline_s + 1)
        except (RayActorError, TimeoutError) as error:
            log.warning("%s did not drain: %s", self.name, type(error).__name__)
        self.kill()

    async def _probe(self) -> str | None:
        """Why the service or its process failed, else None. An actor that does not answer may be busy or stopped."""
        try:
            text: str | None = await _result(self._actor.fault.remote(), PROBE_S)
        except ActorDiedError as error:
            return self._death(str(error))
        except (ActorUnavailableError, TimeoutError, GetTimeoutError) as error:
            log.warning("%s does not answer: %s", self.name, type(error).__name__)
            return None
        return text

    def _death(self, text: str) -> str:
        if "creation task" in text:  # its constructor raised; Ray's text ends with the exception's line
            return f"{self.name}: {text.strip().splitlines()[-1]}"
        return f"{self.name}: {DIED}"


class Sampler(RoleHandle):
    """The sampler; Ray restarts it, and it rebuilds its state from Redis."""

    def __init__(self, run: str, make: Callable[[], Service], redis_url: str) -> None:
        options = {**_options(f"{run}/sampler", "cpu", threads=1, cpus=0.0, gpus=0.0), "max_restarts": UNLIMITED}
        actor = ray.remote(RoleActor).options(**options).remote(True, (make, run, redis_url))
        super().__init__("sampler", actor)
        self._restarts = Restarts()

    async def fault(self, ready: Collection[HostPid]) -> str | None:
        """Why it has failed permanently, or None. `ready`: processes that are ready, or were until recently."""
        state = await asyncio.to_thread(actor_state, self._actor)
        if state.dead:
            return await self._probe() or f"{self.name}: its process ended and is not restarted"
        early = self._restarts.observe(state, ready)
        if early > EARLY_DEATHS:
            return f"{self.name}: {DIED} {early} times in a row before it was ready"
        return None

    def restart(self) -> None:
        """Kill the process, whatever it is doing; Ray restarts it."""
        ray.kill(self._actor, no_restart=False)


def start_tracker(run: str, make: Callable[[], Service], redis_url: str) -> None:
    """Start the run's tracker, or find it; Ray restarts it. Its faults are none of the run's."""
    options = _options(tracker_name(run), "cpu", threads=1, cpus=0.0, gpus=0.0)
    options["runtime_env"] = {"env_vars": service_environment(1, 0.0, tracks=True)}
    options["max_restarts"] = TRACKER_RESTARTS
    ray.remote(RoleActor).options(**options).remote(True, (make, run, redis_url))


def tracker_name(run: str) -> str:
    """The name of the tracker's actor."""
    return f"{run}/tracker"


class Rank(RoleHandle):
    """One learner rank, at first without its service; Ray never restarts it."""

    def __init__(self, run: str, rank: int, group: PlacementGroup, threads: int, cpus: float, gpus: float) -> None:
        options = {**_options(rank_name(run, rank), "learner", threads, cpus, gpus), "max_restarts": 0}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor = ray.remote(RoleActor).options(**options).remote(False)
        super().__init__(f"learner rank {rank}", actor)
        self.actor_id = actor_id(actor)

    async def address(self, deadline_s: float) -> tuple[str, int]:
        """A host and port where the actor runs. Raises TimeoutError if the actor was not placed in time, RoleError."""
        try:
            host, port = await _result(self._actor.address.remote(), deadline_s)
        except RayActorError as error:
            raise RoleError(self._death(str(error))) from None
        return str(host), int(port)

    async def start(self, make: Callable[[], Service], run: str, redis_url: str, deadline_s: float) -> None:
        """Start the actor's service, unless it runs. Raises RoleError when it cannot be created, TimeoutError."""
        try:
            await _result(self._actor.start.remote(make, run, redis_url), deadline_s)
        except RayTaskError as error:
            raise RoleError(f"{self.name}: {type(error.cause).__name__}: {error.cause}") from None
        except RayActorError:
            raise RoleError(f"{self.name}: {DIED} before its service started") from None

    async def fault(self) -> str | None:
        """Why the rank has failed permanently, or None."""
        return await self._probe()


def rank_name(run: str, rank: int | str = "") -> str:
    """The name of a rank's actor; without a rank, the prefix of all their names."""
    return f"{run}/learner-{rank}"


def _options(name: str, role: str, threads: int, cpus: float, gpus: float) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",  # survives the gateway, which finds it by name
        "get_if_exists": True,
        "num_cpus": cpus,
        "num_gpus": gpus,
        "resources": place(role),
        # A drain blocks one thread; probes need another.
        "max_concurrency": 4,
        "runtime_env": {"env_vars": service_environment(threads, gpus)},
    }


def learner_placement(
    run: str, ranks: int, cpus: float, gpus: float, selector: Mapping[str, str] | None = None
) -> PlacementGroup:
    """The run's placement group: one bundle per rank, all or none, as close together as possible.

    `selector`: labels that a node must have.
    """
    bundle = place("learner") | {kind: amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    name = f"{run}/learner"
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        selectors = [dict(selector)] * ranks if selector else None
        return placement_group(
            [bundle] * ranks, strategy="PACK", name=name, lifetime="detached", bundle_label_selector=selectors
        )


def reserved_nodes(run: str) -> list[str]:
    """The id of the Ray node of each of the learner's bundles; none while they are not placed. Blocks."""
    try:
        group = ray.util.get_placement_group(f"{run}/learner")
    except ValueError:
        return []
    return list(filter(None, ray.util.placement_group_table(group).get("bundles_to_node_id", {}).values()))


def release_placement(run: str) -> None:
    """Release the learner's bundles and end the processes in them; no effect when there are none."""
    try:
        remove_placement_group(ray.util.get_placement_group(f"{run}/learner"))
    except ValueError:
        log.debug("run %s has no placement group", run)


def rank_needs(record: RunRecord) -> dict[str, float]:
    """What one rank takes, by Ray's resource."""
    return {"CPU": record.recipe.learner.cpus, "GPU": record.recipe.learner.gpus}


def ranks_of(record: RunRecord, selector: dict[str, str] | None) -> list[Rank]:
    """The ranks of a run, created or found. `selector`: labels that their nodes must have."""
    run, wanted = record.id, record.recipe.learner
    group = learner_placement(run, wanted.ranks, wanted.cpus, wanted.gpus, selector)
    return [Rank(run, rank, group, wanted.threads, wanted.cpus, wanted.gpus) for rank in range(wanted.ranks)]


async def start_ranks(run: str, ranks: list[Rank], redis_url: str, deadline_s: float) -> None:
    """Start each rank's service, unless it runs. Raises TimeoutError, RoleError."""
    host, port = await ranks[0].address(deadline_s)
    starts = []
    for number, rank in enumerate(ranks):
        make = partial(factories.learner, number, len(ranks), host, port)
        starts.append(rank.start(partial(placed, make, holds=False), run, redis_url, deadline_s))
    await asyncio.gather(*starts)


async def end_ranks(run: str) -> None:
    """End all ranks at once, and release their room. Raises TimeoutError."""
    prefix = rank_name(run)
    for name in await asyncio.to_thread(named_actors, prefix):
        if actor := named_actor(name):
            RoleHandle(name, actor).kill()
    release_placement(run)
    ends = time.monotonic() + KILLED_S
    while left := await asyncio.to_thread(named_actors, prefix):
        if time.monotonic() > ends:
            raise TimeoutError(f"killed {KILLED_S:g} s ago and still alive: {', '.join(left)}")
        await asyncio.sleep(POLL_S)
