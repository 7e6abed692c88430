"""Owns a run's single processes: the sampler and the learner ranks, each a named Ray actor.

Must not replace a learner rank: its optimizer state would be lost without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.hosting.environment import NAMESPACE, process_environment
from deploy.hosting.process import HostedService, free_address
from services.shell import Service

log = logging.getLogger(__name__)

SAMPLER_RESTARTS = 3
PROBE_S = 5.0


class RoleError(RuntimeError):
    """A role's service cannot be started; one line."""


class RoleActor:
    """One actor, one service. It exists before its service, so that ranks can agree on an address first."""

    def __init__(self, exit_on_fault: bool, begin_with: tuple[Callable[[], Service], str, str] | None = None) -> None:
        self._exit_on_fault = exit_on_fault
        self._hosted: HostedService | None = None
        if begin_with:
            self.begin(*begin_with)

    def begin(self, make: Callable[[], Service], run: str, redis_url: str) -> None:
        """Start the service; once."""
        if self._hosted is None:
            self._hosted = HostedService(make, run, redis_url, exit_on_fault=self._exit_on_fault)

    def address(self) -> tuple[str, int]:
        """A free host:port of this actor's machine."""
        return free_address()

    def fault(self) -> str | None:
        """One line when the service failed, else None."""
        return self._hosted.fault() if self._hosted else None

    def stop(self, deadline_s: float) -> bool:
        """Drain the service; whether it ended in time."""
        return self._hosted.stop(deadline_s) if self._hosted else True


async def _result(reference: Any, deadline_s: float) -> Any:
    """The value of an object reference. Raises TimeoutError, RayError."""
    async with asyncio.timeout(deadline_s):
        return await asyncio.wrap_future(reference.future())


class Role:
    """A handle on one named actor."""

    def __init__(self, name: str, actor: Any, restarts: int) -> None:
        self.name = name
        self._actor = actor
        self._restarts = restarts

    @classmethod
    def sampler(cls, run: str, make: Callable[[], Service], redis_url: str) -> Role:
        """The sampler; Ray restarts it, and it rebuilds its state from Redis."""
        name = f"{run}/sampler"
        options = {**_options(name, threads=1, cpus=0.0, gpus=0.0), "max_restarts": SAMPLER_RESTARTS}
        actor = ray.remote(RoleActor).options(**options).remote(True, (make, run, redis_url))
        return cls("sampler", actor, SAMPLER_RESTARTS)

    @classmethod
    def learner(cls, run: str, rank: int, group: PlacementGroup | None, threads: int, cpus: float, gpus: float) -> Role:
        """One learner rank, without its service yet; never restarted."""
        options = _options(f"{run}/learner-{rank}", threads, cpus, gpus)
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor = ray.remote(RoleActor).options(**options).remote(False)
        return cls(f"learner rank {rank}", actor, 0)

    async def address(self, deadline_s: float) -> tuple[str, int]:
        """A free host:port where the actor runs. Raises TimeoutError while it cannot be placed, RoleError."""
        try:
            host, port = await _result(self._actor.address.remote(), deadline_s)
        except ActorDiedError as error:
            raise RoleError(self._death(str(error))) from None
        return str(host), int(port)

    async def begin(self, make: Callable[[], Service], run: str, redis_url: str, deadline_s: float) -> None:
        """Start the actor's service, unless it runs. Raises RoleError when it cannot even be made, TimeoutError."""
        try:
            await _result(self._actor.begin.remote(make, run, redis_url), deadline_s)
        except RayTaskError as error:
            raise RoleError(f"{self.name}: {type(error.cause).__name__}: {error.cause}") from None
        except ActorDiedError:
            raise RoleError(f"{self.name}: its process died before its service began") from None

    async def fault(self) -> str | None:
        """Why the role will not work again, or None. A silent actor is no fault: it may be busy or restarting."""
        try:
            text: str | None = await _result(self._actor.fault.remote(), PROBE_S)
        except ActorDiedError as error:
            return self._death(str(error))
        except (ActorUnavailableError, TimeoutError, GetTimeoutError) as error:
            log.warning("%s does not answer: %s", self.name, type(error).__name__)
            return None
        # A restarted role exits with its fault; one that is still there is about to be restarted.
        return None if self._restarts else text

    def _death(self, text: str) -> str:
        if "creation task" in text:  # its constructor raised; Ray's text ends with the exception's line
            return f"{self.name}: {text.strip().splitlines()[-1]}"
        return f"{self.name}: its process died, and was restarted {self._restarts} times as allowed"

    async def stop(self, deadline_s: float) -> None:
        """Drain, then end the actor."""
        try:
            await _result(self._actor.stop.remote(deadline_s), deadline_s + 1)
        except (RayActorError, TimeoutError) as error:
            log.warning("%s did not drain: %s", self.name, type(error).__name__)
        ray.kill(self._actor, no_restart=True)


def _options(name: str, threads: int, cpus: float, gpus: float) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",  # a restarted gateway finds the run's processes again
        "get_if_exists": True,
        "num_cpus": cpus,
        "num_gpus": gpus,
        "max_restarts": 0,
        # A drain blocks one thread; probes need another.
        "max_concurrency": 4,
        "runtime_env": {"env_vars": process_environment(threads)},
    }


def learner_placement(run: str, ranks: int, cpus: float, gpus: float) -> PlacementGroup | None:
    """One bundle per rank, all or none, near each other; None when ranks book nothing."""
    bundle = {kind: amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    if not bundle:
        return None
    name = f"{run}/learner"
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return placement_group([bundle] * ranks, strategy="PACK", name=name, lifetime="detached")


def release_placement(run: str) -> None:
    """Give the learner's bundles back; harmless when there are none."""
    try:
        remove_placement_group(ray.util.get_placement_group(f"{run}/learner"))
    except ValueError:
        log.debug("run %s holds no placement group", run)
