"""Owns a fleet: one Ray Serve application whose replicas each host one service and pull their work from streams.

Must not route requests; Serve only places, checks, replaces and scales the replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from logging.handlers import MemoryHandler
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deploy.hosting.actors import EARLY_DEATHS, host_pid
from deploy.hosting.environment import place, process_environment
from deploy.hosting.hosted_service import DRAIN_S, HostedService
from services.contracts import HostPid
from services.process import Service

log = logging.getLogger(__name__)

T = TypeVar("T")

# Serve replaces a replica after three checks in a row that had no answer in time, or at once when its process is gone:
# one that hangs within about 30 s, and 5 s more until it is killed. Importing an engine on a busy machine held the
# interpreter for 0.6 s at most.
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 9.0
SHUTDOWN_S = 10.0
CALL_S = 20.0
# Serve's controller is an actor like others: when it dies, Ray restarts it within seconds.
CONTROLLER_S = 60.0
POLL_S = 0.5


class ReplicaFailedError(RuntimeError):
    """The service in this replica is over; Serve replaces the replica."""


class Replica:
    """A Serve replica that hosts one service. It exits with a fault of the service: then it is replaced at once."""

    def __init__(self, make: Callable[[], Service], run: str, redis_url: str, workers: int) -> None:
        _unbuffer_log()
        self._hosted = HostedService(make, run, redis_url, workers=workers, exit_on_fault=True)

    def check_health(self) -> None:
        """Called by Serve. Raises ReplicaFailedError when the service ended although nobody asked it to."""
        if self._hosted.done:
            raise ReplicaFailedError(self._hosted.fault() or f"{self._hosted.name} ended although its run goes on")

    def __del__(self) -> None:
        """Called by Serve once, before it ends the replica: leases go back to the stream."""
        if hasattr(self, "_hosted"):
            self._hosted.stop(DRAIN_S)


def _unbuffer_log() -> None:
    """Let Serve's log handlers write to their files themselves.

    An engine that configures logging closes all handlers there are. A buffering one then has no target any more, and a
    Serve controller that begins anew, asking for its file, would take the replica for broken and replace it.
    """
    serve_log = logging.getLogger("ray.serve")
    for handler in list(serve_log.handlers):
        if isinstance(handler, MemoryHandler) and handler.target is not None:
            serve_log.removeHandler(handler)
            serve_log.addHandler(handler.target)


@dataclass
class Replacements:
    """Counts replicas that died before they became ready, since the last that did: the bound on replacing for ever.

    `leaving`: how many replicas go because fewer are wanted.
    """

    leaving: int = 0
    early: int = 0
    _processes: dict[str, HostPid | None] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)

    def observe(self, replicas: Mapping[str, HostPid | None], ready: Collection[HostPid]) -> int:
        """Note the replicas there are, with their processes where known; how many in a row have died early.

        `ready`: processes that are ready, or were until they died lately.
        """
        for replica, process in replicas.items():
            self._processes[replica] = process or self._processes.get(replica)
        for replica, process in self._processes.items():
            if process in ready and replica not in self._ready:
                self._ready.add(replica)
                self.early = 0
        for replica in sorted(self._processes.keys() - replicas.keys()):
            self._depart(replica)
        return self.early

    def _depart(self, replica: str) -> None:
        del self._processes[replica]
        was_ready = replica in self._ready
        self._ready.discard(replica)
        if self.leaving:
            self.leaving -= 1
            return
        self.early += not was_ready
        log.warning("replica %s is gone, %s; it is replaced", replica, "ready" if was_ready else "never ready")


def start_serve() -> None:
    """Start Serve without its HTTP proxy; harmless when it runs."""
    serve.start(proxy_location="Disabled")


def _controller() -> Any:
    return _get_global_client()._controller


def _details(application: str) -> dict[str, Any]:
    """What Serve knows of an application; empty where there is none. Raises RayActorError, GetTimeoutError."""
    try:
        controller = _controller()
    except RayServeException:
        return {}
    known = ray.get(controller.get_serve_instance_details.remote(), timeout=CALL_S)["applications"]
    found: dict[str, Any] = known.get(application, {})
    return found


def _persist(do: Callable[[], T]) -> T:
    """The result of `do`, tried again for a minute while Serve's controller is being restarted."""
    ends = time.monotonic() + CONTROLLER_S
    while True:
        try:
            return do()
        except (RayActorError, GetTimeoutError) as error:
            if time.monotonic() > ends:
                raise
            log.warning("Serve's controller does not answer (%s); trying again", type(error).__name__)
            time.sleep(POLL_S)


class Fleet:
    """One fleet of one run. Its calls block (seconds, as a rule): keep them off an event loop."""

    def __init__(self, run: str, name: str) -> None:
        self.name = name
        self._run = run
        self._application = f"{run}.{name}"
        self._replacements = Replacements()
        self._message = ""

    def start(
        self, make: Callable[[], Service], redis_url: str, *, replicas: int, workers: int, threads: int, cpus: float,
        gpus: float,
    ) -> None:  # fmt: skip
        """Deploy the fleet, or bring the one that runs to `replicas`; replicas start as resources allow.

        Raises TimeoutError while a former fleet of this name is still being ended.
        """
        self._await_end()
        if _persist(self.exists):
            self.scale(replicas)
            return
        deployment = serve.deployment(
            name=self.name,
            num_replicas=replicas,
            ray_actor_options={
                "num_cpus": cpus,
                "num_gpus": gpus,
                "resources": place(self.name),
                "runtime_env": {"env_vars": process_environment(threads)},
            },
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=SHUTDOWN_S,
            graceful_shutdown_wait_loop_s=0.1,
        )(Replica)
        target = serve.RunTarget(
            deployment.bind(make, self._run, redis_url, workers), name=self._application, route_prefix=None,
            external_scaler_enabled=True,
        )  # fmt: skip
        _persist(lambda: self._deploy(target))

    def _deploy(self, target: Any) -> None:
        if not self.exists():
            start_serve()
            serve.run_many([target], wait_for_applications_running=False)

    def _await_end(self) -> None:
        ends = time.monotonic() + CONTROLLER_S
        while str(_persist(lambda: _details(self._application)).get("status")) == "DELETING":
            if time.monotonic() > ends:
                raise TimeoutError(f"the former {self.name} fleet of {self._run} is there after {CONTROLLER_S:g} s")
            time.sleep(POLL_S)

    def exists(self) -> bool:
        """Whether Serve holds anything of the fleet. Raises RayActorError, GetTimeoutError."""
        return bool(_details(self._application))

    def scale(self, replicas: int) -> None:
        """Change the number of replicas; those that stay go on undisturbed. Raises TimeoutError, RayActorError.

        Serve's external-scaler call changes the target alone. A new `serve.run` would give the deployment a new code
        version, and with it a restart of every replica.
        """
        before = self._target()
        if replicas == before:
            return
        identity = DeploymentID(name=self.name, app_name=self._application)
        _persist(
            lambda: ray.get(_controller().update_deployment_replicas.remote(identity, replicas), timeout=CALL_S),
        )
        self._replacements.leaving += max(0, before - replicas)

    def _target(self) -> int:
        """How many replicas Serve was last told to run: it remembers, also when this process is a new one."""
        ends = time.monotonic() + CALL_S
        while True:
            deployment = _persist(lambda: _details(self._application)).get("deployments", {}).get(self.name)
            if deployment is not None:
                return int(deployment["target_num_replicas"])
            if time.monotonic() > ends:
                raise TimeoutError(f"Serve does not know the {self.name} fleet of {self._run} after {CALL_S:g} s")
            time.sleep(POLL_S)

    def fault(self, ready: Collection[HostPid]) -> str | None:
        """Why the fleet cannot go on: Serve gave up, or replacing does not help. None while it can.

        `ready`: processes that are ready, or were until they died lately.
        """
        try:
            details = _details(self._application)
        except (RayActorError, GetTimeoutError) as error:
            log.warning("the %s fleet of %s: Serve's controller: %s", self.name, self._run, type(error).__name__)
            return None
        deployment = details.get("deployments", {}).get(self.name, {})
        status = str(getattr(deployment.get("status"), "value", deployment.get("status", "")))
        message = _first_line(str(deployment.get("message", "")))
        self._message = message or self._message
        if status == "DEPLOY_FAILED" or str(details.get("status")) == "DEPLOY_FAILED":
            return f"{self.name} fleet: Ray Serve gave up: {message or _first_line(str(details.get('message', '')))}"
        alive = {str(one["replica_id"]): _process(one) for one in deployment.get("replicas", [])}
        early = self._replacements.observe(alive, ready)
        if early > EARLY_DEATHS:
            return f"{self.name} fleet: {early} replicas in a row died before they were ready; {self._message}"
        return None

    def begin_stop(self) -> None:
        """Ask Serve to drain and end the fleet; returns at once."""
        if _persist(self.exists):
            serve.delete(self._application, _blocking=False)

    def gone(self) -> bool:
        """Whether Serve holds nothing of the fleet any more."""
        return not _persist(self.exists)


def _process(replica: Mapping[str, Any]) -> HostPid | None:
    """Where a replica lives; None until Serve knows."""
    host, pid = replica.get("node_ip"), replica.get("pid")
    return host_pid(host, pid) if host and pid else None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
