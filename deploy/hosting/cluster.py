"""Owns the Cluster protocol's implementation on Ray: fleets on Serve, sampler and learner ranks as actors.

Must not keep what cannot be found again: actors, placement groups and Serve applications have names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import list_named_actors

from deploy.hosting import factories
from deploy.hosting.environment import NAMESPACE, process_environment, runs_folder
from deploy.hosting.fleet import Fleet
from deploy.hosting.roles import Role, learner_placement, release_placement
from services.streams.records import RunRecord

log = logging.getLogger(__name__)

PREPARE_S = 600.0
POLL_S = 0.2


class PlacementError(RuntimeError):
    """A process could not be placed within the run's start-up deadline."""


def _prepare(document: dict[str, Any], cache: str) -> str:
    """Runs in a worker process: the model library is heavy, and the gateway must stay light."""
    from learner.model_source import prepare_model
    from services.settings import Model

    return str(prepare_model(Model.model_validate(document), Path(cache)))


@dataclass
class _Placed:
    """What this process knows to run for one run."""

    rollout: Fleet
    verifier: Fleet
    roles: list[Role] = field(default_factory=list)

    @property
    def fleets(self) -> tuple[Fleet, Fleet]:
        return (self.rollout, self.verifier)


class RayCluster:
    """Places runs on the Ray cluster of this process; see services.controller.cluster.Cluster."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._placed: dict[str, _Placed] = {}

    async def prepare_model(self, record: RunRecord) -> str:
        """Materialise the model under `runs/models`. Raises learner's ModelSourceError, TimeoutError."""
        threads = record.recipe.learner.threads
        task = ray.remote(_prepare).options(
            num_cpus=0, max_retries=0, runtime_env={"env_vars": process_environment(threads)}
        )
        model = record.recipe.model.model_dump(mode="json")
        try:
            async with asyncio.timeout(PREPARE_S):
                reference = task.remote(model, str(Path(runs_folder()) / "models"))
                return str(await asyncio.wrap_future(reference.future()))
        except RayTaskError as error:
            raise error.cause from None

    async def start(self, record: RunRecord) -> None:
        """Start everything of a run; one of no rollout steps has no learner. Raises PlacementError when the learner
        finds no place."""
        run, recipe = record.id, record.recipe
        if run in self._placed:
            return
        placed = self._placed[run] = _Placed(Fleet(run, "rollout"), Fleet(run, "verifier"))
        placed.roles.append(Role.sampler(run, factories.sampler, self._redis_url))
        # The engine takes longest to load, so its fleet goes first.
        await asyncio.to_thread(
            placed.rollout.start, factories.rollout, self._redis_url, replicas=record.rollout_replicas,
            workers=recipe.rollout.tensor_parallel, threads=recipe.rollout.threads, cpus=recipe.rollout.cpus,
            gpus=recipe.rollout.gpus,
        )  # fmt: skip
        await asyncio.to_thread(
            placed.verifier.start, factories.verifier, self._redis_url, replicas=recipe.verifier.replicas, workers=1,
            threads=1, cpus=recipe.verifier.cpus, gpus=0.0,
        )  # fmt: skip
        if recipe.limits.rollout_steps:
            await self._start_learner(record, placed)

    async def _start_learner(self, record: RunRecord, placed: _Placed) -> None:
        wanted, run = record.recipe.learner, record.id
        deadline = record.recipe.limits.startup_timeout_s
        group = learner_placement(run, wanted.ranks, wanted.cpus, wanted.gpus)
        ranks = [
            Role.learner(run, rank, group, wanted.threads, wanted.cpus, wanted.gpus) for rank in range(wanted.ranks)
        ]
        placed.roles += ranks
        try:
            host, port = await ranks[0].address(deadline)
            await asyncio.gather(*(
                role.begin(
                    partial(factories.learner, rank, wanted.ranks, host, port), run, self._redis_url, deadline
                )
                for rank, role in enumerate(ranks)
            ))  # fmt: skip
        except TimeoutError:
            raise PlacementError(
                f"the learner ({wanted.ranks} x {wanted.cpus:g} CPUs, {wanted.gpus:g} GPUs) was not placed "
                f"within limits.startup_timeout_s = {deadline:g} s"
            ) from None

    async def scale_rollout(self, run: str, replicas: int) -> None:
        """Change the number of rollout replicas; those that stay keep their processes."""
        if placed := self._placed.get(run):
            await asyncio.to_thread(placed.rollout.scale, replicas)

    async def faults(self, run: str) -> list[str]:
        """Roles that died for good and fleets whose replacing does not help, one line each."""
        placed = self._placed.get(run)
        if placed is None:
            return []
        found = await asyncio.gather(
            *(role.fault() for role in placed.roles), *(asyncio.to_thread(fleet.fault) for fleet in placed.fleets)
        )
        return [fault for fault in found if fault]

    async def shortage(self, record: RunRecord) -> str | None:
        """Why the run does not fit now: what it books, what the cluster has, what is free."""
        if record.id in self._placed or self._lost_roles(record.id):
            return None  # what it needs it holds
        total, free = await asyncio.to_thread(lambda: (ray.cluster_resources(), ray.available_resources()))
        for kind, needed in _needs(record).items():
            has, left = total.get(kind, 0.0), free.get(kind, 0.0)
            if needed > left + 1e-6:
                return f"needs {needed:g} {kind}s; the cluster has {has:g}, of which {left:g} are free"
        return None

    async def stop(self, run: str, deadline_s: float) -> None:
        """Drain all of a run's processes at once, then end what is left at the deadline."""
        placed = self._placed.pop(run, None) or _Placed(Fleet(run, "rollout"), Fleet(run, "verifier"))
        ends = time.monotonic() + deadline_s
        roles = placed.roles or self._lost_roles(run)
        for fleet in placed.fleets:
            await asyncio.to_thread(fleet.begin_stop)
        await asyncio.gather(*(role.stop(max(1.0, deadline_s - 2)) for role in roles))
        release_placement(run)
        for fleet in placed.fleets:
            while not await asyncio.to_thread(fleet.gone):
                if time.monotonic() > ends:
                    log.warning("the %s fleet of %s is still draining after %g s", fleet.name, run, deadline_s)
                    break
                await asyncio.sleep(POLL_S)

    def _lost_roles(self, run: str) -> list[Role]:
        """Roles of a run that an earlier gateway started."""
        names = [one["name"] for one in list_named_actors(all_namespaces=True) if one["name"].startswith(f"{run}/")]
        return [Role(name, ray.get_actor(name, NAMESPACE), 0) for name in names]


def _needs(record: RunRecord) -> dict[str, float]:
    recipe = record.recipe
    ranks = recipe.learner.ranks if recipe.limits.rollout_steps else 0
    cpus = (
        ranks * recipe.learner.cpus
        + record.rollout_replicas * recipe.rollout.cpus
        + recipe.verifier.replicas * recipe.verifier.cpus
    )
    gpus = ranks * recipe.learner.gpus + record.rollout_replicas * recipe.rollout.gpus
    return {"CPU": cpus, "GPU": gpus}
