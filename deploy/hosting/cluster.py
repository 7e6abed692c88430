"""Owns the Cluster protocol's implementation on Ray: fleets on Serve, sampler and learner ranks as actors.

Must not keep state that a restarted gateway cannot find: actors, placement groups and Serve applications have names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray

from deploy.hosting import factories
from deploy.hosting.actors import named_actor, named_actors
from deploy.hosting.fleet import Fleet
from deploy.hosting.nodes import ranks as learner_nodes
from deploy.hosting.nodes.places import Locations
from deploy.hosting.nodes.preparing import check_fit, on_a_node, prepare
from deploy.hosting.roles import (
    DIED,
    TRACKER_STOP_S,
    Rank,
    RoleError,
    RoleHandle,
    Sampler,
    end_ranks,
    rank_name,
    rank_needs,
    ranks_of,
    release_placement,
    reserved_nodes,
    start_ranks,
    start_tracker,
    tracker_name,
)
from services.contracts import HostPid
from services.settings import ClusterLimitsError, load_cluster_limits, resource_requests
from services.settings.rewards.limits import verifier_role
from services.storage.hub.address import is_hub
from services.storage.hub.copies import pinned_data
from services.storage.models import inputs_folder, models_folder
from services.streams.runs.places import AvoidedPlace, Location
from services.streams.state.run_record import RunRecord

log = logging.getLogger(__name__)

POLL_S = 0.2
ADOPT_S = 20.0
"""How long ranks that a previous gateway started may take to answer the new one."""
RESTART_UNFINISHED = "the learner: its ranks were ended, and not all of them have been restarted"


class PlacementError(RuntimeError):
    """A process could not be placed within the run's start-up deadline."""


@dataclass
class _Placed:
    """What this process has placed for one run. `lost`: faults of the learner that its ranks do not report.

    `failed`: what its ranks reported last, by actor. `stuck_on`: the avoided nodes that its ranks had no room to leave.
    """

    rollout: Fleet
    verifier: Fleet
    sampler: Sampler
    ranks: list[Rank] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stuck_on: list[AvoidedPlace] | None = None

    @property
    def fleets(self) -> tuple[Fleet, Fleet]:
        """Both fleets."""
        return self.rollout, self.verifier


class RayCluster:
    """Places runs on the Ray cluster that this process has joined; see services.controller.cluster.Cluster."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._placed: dict[str, _Placed] = {}
        self._avoided: dict[str, list[AvoidedPlace]] = {}
        self._locations = Locations()

    async def prepare_model(self, record: RunRecord) -> str:
        """Prepare the model on one node, under `runs/models`; returns the name by which every node finds it.

        Raises learner's ModelSourceError, StoreError, TimeoutError.
        """
        model = record.recipe.model.model_dump(mode="json")
        return str(await on_a_node(record, prepare, model, str(models_folder())))

    async def prepare_data(self, record: RunRecord) -> dict[str, str]:
        """Download the data of the hub on one node, under `runs/inputs`; see Cluster.

        Raises StoreError, TimeoutError.
        """
        sources = record.recipe.data_sources.items()
        fields = {str(source.path): f"{section}.path" for section, source in sources if is_hub(source.path)}
        return dict(await on_a_node(record, pinned_data, fields, inputs_folder()))

    async def check_memory(self, record: RunRecord) -> None:
        """Compare what the run needs with its workers, the GPUs' memory as the chart states it, and an only machine.

        Raises ModelDoesNotFitError, StoreError, TimeoutError.
        """
        try:
            limits = load_cluster_limits()
            # A chart adds nodes when a run needs them, so there is more memory than that of one.
            alone = limits is None and await asyncio.to_thread(_has_one_node)
        except ClusterLimitsError as error:
            log.warning("%s; the memory that run %s needs is not checked", error, record.id)
            limits, alone = None, False
        gib = {role: getattr(limits, role).least_gpu_memory_gib if limits else None for role in ("learner", "rollout")}
        replicas = record.rollout_replicas if alone else None
        # The size of the model takes seconds to compute.
        if alone or any(gib.values()) or record.recipe.rollout.tensor_parallel > 1:
            document = record.recipe.model_dump(mode="json")
            await on_a_node(record, check_fit, document, record.model_path, gib, replicas, str(models_folder()))

    async def start(self, record: RunRecord) -> None:
        """Start all processes of a run, or find those that a previous gateway started.

        A run without rollout steps has no learner. Raises PlacementError when the learner cannot be placed,
        TimeoutError, RayError.
        """
        run, recipe = record.id, record.recipe
        if placed := self._placed.get(run):
            # This call may be a retry, and an earlier change of the number of replicas may have been lost.
            await asyncio.to_thread(placed.rollout.scale, record.rollout_replicas)
            await asyncio.to_thread(placed.verifier.scale, recipe.verifier.replicas)
            return
        sampler = Sampler(run, factories.sampler, self._redis_url)
        placed = _Placed(Fleet(run, "rollout"), Fleet(run, "verifier"), sampler)
        # The engine takes longest to load, so its fleet goes first.
        await asyncio.to_thread(
            placed.rollout.start,
            factories.rollout,
            self._redis_url,
            replicas=record.rollout_replicas,
            workers=recipe.rollout.tensor_parallel,
            threads=recipe.rollout.threads,
            cpus=recipe.rollout.cpus,
            gpus=recipe.rollout.gpus,
        )
        await asyncio.to_thread(
            placed.verifier.start,
            factories.verifier,
            self._redis_url,
            replicas=recipe.verifier.replicas,
            workers=1,
            threads=1,
            cpus=recipe.verifier.cpus,
            gpus=0.0,
            role=verifier_role(recipe.rewards),
        )
        if recipe.limits.rollout_steps:
            await self._start_learner(record, placed)
        if recipe.tracking.named:
            await asyncio.to_thread(start_tracker, run, factories.tracker, self._redis_url)
        self._placed[run] = placed

    async def _start_learner(self, record: RunRecord, placed: _Placed) -> None:
        wanted, run = record.recipe.learner, record.id
        names = {rank_name(run, rank) for rank in range(wanted.ranks)}
        found = names.intersection(await asyncio.to_thread(named_actors, rank_name(run)))
        adopting = bool(found)
        if adopting and found != names:
            # A new rank cannot join the others midway: the whole learner has to be restarted.
            placed.lost = [f"{name} died while no gateway was running" for name in sorted(names - found)]
            return
        deadline = ADOPT_S if adopting else record.recipe.limits.startup_timeout_s
        avoided = learner_nodes.of_ranks(self._avoided.get(run, ()))
        if not adopting and avoided != placed.stuck_on:
            if await self._start_apart(record, placed, deadline / 2):
                return
            deadline = deadline / 2 if avoided == placed.stuck_on else deadline
        placed.ranks = ranks_of(record, None)
        try:
            await start_ranks(run, placed.ranks, self._redis_url, deadline)
        except RoleError as error:
            placed.lost = [str(error)]
        except TimeoutError:
            if not adopting:
                raise PlacementError(
                    f"the learner ({wanted.ranks} x {wanted.cpus:g} CPUs, {wanted.gpus:g} GPUs) was not placed "
                    f"within limits.startup_timeout_s = {deadline:g} s"
                ) from None
            placed.lost = [f"the learner did not answer the new gateway within {deadline:g} s"]
        else:
            placed.lost = []

    async def _start_apart(self, record: RunRecord, placed: _Placed, deadline_s: float) -> bool:
        """Start the ranks apart from the nodes that they avoid, if there are some; whether they have started.

        The room elsewhere may be another run's, or a pod's that never comes: `stuck_on` is then set, and nothing left.
        """
        run, avoided = record.id, learner_nodes.of_ranks(self._avoided.get(record.id, ()))
        ranks, needs = record.recipe.learner.ranks, rank_needs(record)
        selector = await asyncio.to_thread(learner_nodes.selector, ranks, needs, avoided)
        if not selector:
            return False
        placed.ranks = ranks_of(record, selector)
        try:
            await start_ranks(run, placed.ranks, self._redis_url, deadline_s)
        except RoleError as error:
            placed.lost = [str(error)]
        except TimeoutError:
            log.warning("run %s: no room for its learner apart from avoided nodes in %g s", run, deadline_s)
            placed.ranks, placed.stuck_on = [], avoided
            await end_ranks(run)
            return False
        else:
            placed.lost = []
        return True

    async def restart_learner(self, record: RunRecord) -> None:
        """End all ranks at once, whatever they are doing, and start them again.

        Raises PlacementError, TimeoutError, RayError. After that `learner_fault` reports an unfinished restart until
        a repeated call succeeds, which also ends the processes that this call left.
        """
        placed = self._placed[record.id]
        placed.ranks, placed.failed, placed.lost = [], {}, [RESTART_UNFINISHED]
        await end_ranks(record.id)
        await asyncio.to_thread(learner_nodes.leave, self._avoided.get(record.id, ()))
        await self._start_learner(record, placed)

    async def restart_sampler(self, run: str) -> None:
        """Kill the sampler's process, whatever it is doing; Ray restarts it. Raises RayError."""
        self._placed[run].sampler.restart()

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; the others keep their processes. Raises TimeoutError, RayError."""
        if placed := self._placed.get(run):
            await asyncio.to_thread(placed.rollout.scale, replicas)

    async def scale_verifier(self, run: str, replicas: int) -> None:
        """Change the number of verifier replicas; the others keep their processes. Raises TimeoutError, RayError."""
        if placed := self._placed.get(run):
            await asyncio.to_thread(placed.verifier.scale, replicas)

    async def faults(self, run: str, ready: Collection[HostPid], joining: Collection[HostPid] = ()) -> list[str]:
        """Services that failed permanently, one line each: the sampler or fleets that keep dying before they are ready.

        `ready`, `joining`: the run's processes in that state, or that were until they died recently.
        """
        placed = self._placed.get(run)
        if placed is None:
            return []
        found = await asyncio.gather(
            placed.sampler.fault(ready),
            *(
                asyncio.to_thread(fleet.fault, ready, self._avoided_by(run, fleet.name), joining)
                for fleet in placed.fleets
            ),
        )
        return [fault for fault in found if fault]

    def _avoided_by(self, run: str, service: str) -> list[Location]:
        return [each.place for each in self._avoided.get(run, ()) if each.service == service]

    async def avoid(self, run: str, places: Collection[AvoidedPlace]) -> None:
        """Place no rank there from now on, if there is room elsewhere; replicas that are placed there only wait."""
        self._avoided[run] = list(places)

    async def used_up(self, run: str) -> list[AvoidedPlace]:
        """Places where replicas kept dying before they were ready, although there are others."""
        placed = self._placed.get(run)
        found = [await asyncio.to_thread(fleet.used_up) for fleet in placed.fleets] if placed else []
        return list(chain.from_iterable(found))

    async def blamed(self, record: RunRecord) -> list[AvoidedPlace]:
        """The nodes behind the fault that `learner_fault` reported last, if the ranks can leave them; `count` is 1."""
        placed = self._placed.get(record.id)
        if placed is None or not placed.failed:
            return []
        ranks, needs = record.recipe.learner.ranks, rank_needs(record)
        own = await asyncio.to_thread(reserved_nodes, record.id)
        return await asyncio.to_thread(learner_nodes.blamed, placed.failed, DIED, self._locations, ranks, needs, own)

    async def learner_fault(self, run: str) -> str | None:
        """Why the learner has to be restarted: a rank failed, died, or was lost; else None."""
        placed = self._placed.get(run)
        if placed is None:
            return None
        faults = await asyncio.gather(*(rank.fault() for rank in placed.ranks))
        placed.failed = {rank.actor_id: fault for rank, fault in zip(placed.ranks, faults, strict=True) if fault}
        found = list(placed.failed.values())
        # Ranks whose process died come first: they cause the errors of the other ranks.
        return "; ".join([*placed.lost, *sorted(found, key=lambda fault: DIED not in fault)]) or None

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run does not fit now: what it needs, what the cluster has, what is free."""
        placed = await asyncio.to_thread(named_actors, f"{record.id}/")
        if placed or record.id in self._placed:
            return None  # its resources are reserved already
        total, free = await asyncio.to_thread(lambda: (ray.cluster_resources(), ray.available_resources()))
        for kind, needed in _needs(record).items():
            has, left = total.get(kind, 0.0), free.get(kind, 0.0)
            if needed > left + 1e-6:
                return f"needs {needed:g} {kind}s; the cluster has {has:g}, and {left:g} are free"
        return None

    async def fits_alone(self, record: RunRecord) -> bool:
        """Whether the cluster as it is now has what the run needs, whether or not it is free."""
        total = await asyncio.to_thread(ray.cluster_resources)
        return all(needed <= total.get(kind, 0.0) + 1e-6 for kind, needed in _needs(record).items())

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain all of a run's processes at once, and end those that are left at the deadline.

        Raises ExceptionGroup with all failures, after the other processes were ended.
        """
        self._placed.pop(run, None)
        self._avoided.pop(run, None)
        ends = time.monotonic() + deadline_s
        fleets = [Fleet(run, "rollout"), Fleet(run, "verifier")]
        failed = await _all_of(
            *(asyncio.to_thread(fleet.request_stop) for fleet in fleets), _stop_roles(run, max(1.0, deadline_s - 2))
        )
        failed += await _all_of(asyncio.to_thread(release_placement, run))
        failed += await _all_of(*(_await_gone(fleet, ends) for fleet in fleets))
        if failed:
            raise ExceptionGroup(f"not all processes of run {run} were ended: {'; '.join(map(repr, failed))}", failed)


def _has_one_node() -> bool:
    return [node["Alive"] for node in ray.nodes()].count(True) == 1


async def _all_of(*parts: Coroutine[Any, Any, None]) -> list[Exception]:
    """Run all parts to their end even if some fail; returns what they raised."""
    found = await asyncio.gather(*parts, return_exceptions=True)
    return [error for error in found if isinstance(error, Exception)]


async def _stop_roles(run: str, deadline_s: float) -> None:
    names = await asyncio.to_thread(named_actors, f"{run}/")
    roles = [RoleHandle(name, actor) for name in names if (actor := named_actor(name))]
    # Any other service may be given the whole deadline, because it has work in flight.
    shorter = {tracker_name(run): min(deadline_s, TRACKER_STOP_S)}
    await asyncio.gather(*(role.stop(shorter.get(role.name, deadline_s)) for role in roles))


async def _await_gone(fleet: Fleet, ends: float) -> None:
    while not await asyncio.to_thread(fleet.gone):
        if time.monotonic() > ends:
            log.warning("the %s fleet is still draining at its deadline", fleet.name)
            return
        await asyncio.sleep(POLL_S)


def _needs(record: RunRecord) -> dict[str, float]:
    booked = list(chain.from_iterable(resource_requests(record.recipe, record.rollout_replicas).values()))
    return {"CPU": sum(process.cpus for process in booked), "GPU": sum(process.gpus for process in booked)}
