"""Owns a fleet: one Ray Serve application whose replicas each host one service and pull work from streams.

Must not route requests; Serve only places, checks, replaces and scales the replicas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from logging.handlers import MemoryHandler
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError

from deploy.hosting.actors import host_pid
from deploy.hosting.environment import place, service_environment
from deploy.hosting.hosted_service import DRAIN_S, HostedService
from deploy.hosting.nodes.deaths import EarlyDeaths, Rooms, SeenReplica
from deploy.hosting.nodes.placed import placed
from deploy.hosting.nodes.places import Locations, rooms
from deploy.hosting.ray_internals import bind_replica, delete_application, serve_applications, set_replicas
from services.contracts import HostPid
from services.contracts.listening import advertised_host
from services.process.hosting import Service
from services.streams.runs.places import AVOIDED_S, AvoidedPlace, Location

log = logging.getLogger(__name__)

T = TypeVar("T")

# Serve replaces a replica at once when its process is gone, and after three health checks in a row without an answer in
# time: a replica that hangs is replaced within about 30 s and killed 5 s later. Importing an engine on a busy machine
# blocked the interpreter for 0.6 s at most.
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 9.0
SHUTDOWN_S = 10.0
CALL_S = 20.0
# Serve's controller is an actor: when it dies, Ray restarts it within seconds.
CONTROLLER_S = 60.0
POLL_S = 0.5
_DESCRIBING = threading.Lock()


class ReplicaFailedError(RuntimeError):
    """The service in this replica has ended; Serve replaces the replica."""


class HostedReplica:
    """A Serve replica that hosts one service. It exits when the service fails, and is then replaced at once."""

    def __init__(self, make: Callable[[], Service], run: str, redis_url: str, workers: int) -> None:
        _unbuffer_log()
        bind_replica(advertised_host())
        self._hosted = HostedService(partial(placed, make), run, redis_url, workers=workers, exit_on_fault=True)

    def check_health(self) -> None:
        """Called by Serve. Raises ReplicaFailedError when the service ended without having been stopped."""
        if self._hosted.done:
            raise ReplicaFailedError(self._hosted.fault() or f"{self._hosted.name} ended although its run continues")

    def __del__(self) -> None:
        """Called by Serve once, before it ends the replica: the service drains and releases its leases."""
        if hasattr(self, "_hosted"):
            self._hosted.stop(DRAIN_S)


def _unbuffer_log() -> None:
    """Replace Serve's buffering log handlers by their targets.

    An engine that configures logging closes all existing handlers. A closed buffering handler has no target, and a
    restarted Serve controller, which asks for the target's file, would replace the replica as broken.
    """
    serve_log = logging.getLogger("ray.serve")
    for handler in list(serve_log.handlers):
        if isinstance(handler, MemoryHandler) and handler.target is not None:
            serve_log.removeHandler(handler)
            serve_log.addHandler(handler.target)


def start_serve() -> None:
    """Start Serve without its HTTP proxy; no effect when it runs already."""
    serve.start(proxy_location="Disabled")


def _details(application: str) -> dict[str, Any]:
    """What Serve knows of an application; empty if there is none. Raises RayActorError, GetTimeoutError."""
    found: dict[str, Any] = serve_applications(CALL_S).get(application, {})
    return found


def _retried(call: Callable[[], T]) -> T:
    """The result of `call`, retried for CONTROLLER_S seconds while Serve's controller is being restarted."""
    ends = time.monotonic() + CONTROLLER_S
    while True:
        try:
            return call()
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > ends:
                raise
            log.warning("Serve's controller does not answer (%s); retrying", type(error).__name__)
            time.sleep(POLL_S)


@contextmanager
def _described_alone() -> Iterator[None]:
    """Describe or deploy an application while no other thread does. Raises TimeoutError.

    Serve pickles its own modules by value, which it states in a table of the process before, and removes after: a
    second thread that does the same meanwhile finds its entry removed, and fails.
    """
    if not _DESCRIBING.acquire(timeout=CONTROLLER_S):
        raise TimeoutError(f"another fleet has been deployed for {CONTROLLER_S:g} s; this one waited for it")
    try:
        yield
    finally:
        _DESCRIBING.release()


class Fleet:
    """One fleet of one run. Its calls block, usually for seconds: do not call them on an event loop."""

    def __init__(self, run: str, name: str) -> None:
        self.name = name
        self._run = run
        self._application = f"{run}.{name}"
        self._deaths = EarlyDeaths()
        self._locations = Locations()
        self._ray_nodes: dict[Location, str] = {}
        self._role, self._cpus, self._gpus = name, 0.0, 0.0
        self._message = ""

    def start(
        self,
        make: Callable[[], Service],
        redis_url: str,
        *,
        replicas: int,
        workers: int,
        threads: int,
        cpus: float,
        gpus: float,
        role: str = "",
    ) -> None:
        """Deploy the fleet, or scale a running one to `replicas`. Replicas start as soon as resources allow.

        `role`: of the nodes that host it; by default the fleet's name. Raises TimeoutError while a previous fleet of
        this name is still being ended.
        """
        self._role, self._cpus, self._gpus = role or self.name, cpus, gpus
        self._await_end()
        if _retried(self.exists):
            self.scale(replicas)
            return
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": place(self._role),
            "runtime_env": {"env_vars": service_environment(threads, gpus)},
        }
        target = self._described((make, self._run, redis_url, workers), replicas, options)
        _retried(lambda: self._deploy(target))

    def _described(self, arguments: tuple[Any, ...], replicas: int, options: dict[str, Any]) -> Any:
        """The application as Serve takes it. `arguments`: of HostedReplica; `options`: of each replica's actor."""
        with _described_alone():
            deployment = serve.deployment(
                name=self.name,
                num_replicas=replicas,
                ray_actor_options=options,
                health_check_period_s=HEALTH_PERIOD_S,
                health_check_timeout_s=HEALTH_TIMEOUT_S,
                graceful_shutdown_timeout_s=SHUTDOWN_S,
                graceful_shutdown_wait_loop_s=0.1,
            )(HostedReplica)
            return serve.RunTarget(
                deployment.bind(*arguments),
                name=self._application,
                route_prefix=None,
                external_scaler_enabled=True,
            )

    def _deploy(self, target: Any) -> None:
        if not self.exists():
            start_serve()
            with _described_alone():
                serve.run_many([target], wait_for_applications_running=False)

    def _await_end(self) -> None:
        ends = time.monotonic() + CONTROLLER_S
        while str(_retried(lambda: _details(self._application)).get("status")) == "DELETING":
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"the previous {self.name} fleet of {self._run} has not ended after {CONTROLLER_S:g} s"
                )
            time.sleep(POLL_S)

    def exists(self) -> bool:
        """Whether Serve has the fleet, even while the fleet ends. Raises RayActorError, GetTimeoutError."""
        return bool(_details(self._application))

    def scale(self, replicas: int) -> None:
        """Change the number of replicas; those that stay are not restarted. Raises TimeoutError, RayActorError."""
        before = self._target()
        if replicas == before:
            return
        _retried(lambda: set_replicas(self._application, self.name, replicas, CALL_S))
        self._deaths.leaving += max(0, before - replicas)

    def _target(self) -> int:
        """The number of replicas last requested from Serve; Serve keeps the number when this process is restarted."""
        ends = time.monotonic() + CALL_S
        while True:
            deployment = _retried(lambda: _details(self._application)).get("deployments", {}).get(self.name)
            if deployment is not None:
                return int(deployment["target_num_replicas"])
            if time.monotonic() > ends:
                raise TimeoutError(f"Serve does not know the {self.name} fleet of {self._run} after {CALL_S:g} s")
            time.sleep(POLL_S)

    def fault(
        self, ready: Collection[HostPid], avoided: Collection[Location] = (), joining: Collection[HostPid] = ()
    ) -> str | None:
        """Why the fleet has failed permanently: its deployment failed, or replacing replicas does not help; else None.

        `ready`, `joining`: processes in that state, or that were until they died recently. `avoided`: places where
        replicas only wait.
        """
        try:
            details = _details(self._application)
        except (RayActorError, GetTimeoutError) as error:
            log.warning("the %s fleet of %s: Serve's controller: %s", self.name, self._run, type(error).__name__)
            return None
        deployment = details.get("deployments", {}).get(self.name, {})
        message = _first_line(str(deployment.get("message", "")))
        self._message = message or self._message
        if _deployment_failed(details, deployment):
            why = message or _first_line(str(details.get("message", "")))
            return f"{self.name} fleet: Ray Serve failed to deploy it: {why}"
        alive = {str(replica["replica_id"]): self._seen(replica) for replica in deployment.get("replicas", [])}
        early = self._deaths.observe(alive, ready, avoided, joining)
        if self._deaths.suspicious and self._deaths.hopeless(self._rooms()):
            where = "; ".join(f"{count} at {place}" for place, count in sorted(self._deaths.at.items()) if count)
            died = f"{early} replicas in a row died before they were ready" + (f" ({where})" if where else "")
            died = died if early else "none of its replicas has a place that is not avoided"
            avoids = "".join(f"; {place} is avoided" for place in sorted(avoided))
            return f"{self.name} fleet: {died}{avoids}; {self._message}"
        return None

    def used_up(self) -> list[AvoidedPlace]:
        """The places to avoid from now on: replicas kept dying there before they were ready, and there are others."""
        if not self._deaths.suspicious:
            return []
        return [
            AvoidedPlace(
                service=self.name,
                node=place.node,
                device=place.device,
                count=self._deaths.failed_at[place],
                reason="died before they were ready",
                until=time.time() + AVOIDED_S,
                ray_node=self._ray_nodes.get(place, ""),
            )
            for place in self._deaths.used_up(self._rooms())
        ]

    def _rooms(self) -> Rooms:
        return rooms(self._role, self._cpus, self._gpus)

    def _seen(self, replica: Mapping[str, Any]) -> SeenReplica:
        """A replica's process and place; the place is asked for once."""
        name, actor = str(replica["replica_id"]), replica.get("actor_id")
        place = self._deaths.place(name)
        if place is None and actor and (found := self._locations.find(str(actor))):
            place, ray_node = found
            self._ray_nodes[place] = ray_node
        return SeenReplica(_process(replica), place)

    def request_stop(self) -> None:
        """Ask Serve to drain and end the fleet; returns at once."""
        if _retried(self.exists):
            delete_application(self._application)

    def gone(self) -> bool:
        """Whether the fleet has ended and Serve has removed it."""
        return not _retried(self.exists)


def _deployment_failed(details: Mapping[str, Any], deployment: Mapping[str, Any]) -> bool:
    """Whether Serve failed to deploy a fleet, and does not try again.

    Until all replicas of a new fleet run, Serve has the same status for one that died, which it replaces.
    """
    failed = "DEPLOY_FAILED" in (_word(deployment.get("status")), _word(details.get("status")))
    return failed and _word(deployment.get("status_trigger")) != "HEALTH_CHECK_FAILED"


def _word(value: Any) -> str:
    """A status of Serve, which may be a member of an enumeration."""
    return str(getattr(value, "value", value))


def _process(replica: Mapping[str, Any]) -> HostPid | None:
    """Host and process id of a replica; None until Serve knows them."""
    host, pid = replica.get("node_ip"), replica.get("pid")
    return host_pid(host, pid) if host and pid else None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
