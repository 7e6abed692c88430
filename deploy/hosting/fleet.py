"""Owns a fleet: one Ray Serve application whose replicas each host one service and pull their work from streams.

Must not route requests; Serve only places, checks, replaces and scales the replicas.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deploy.hosting.environment import process_environment
from deploy.hosting.process import DRAIN_S, HostedService
from services.shell import Service

log = logging.getLogger(__name__)

# Serve replaces a replica after three failed checks in a row, or at once when its process is gone.
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
SHUTDOWN_S = 10.0
CALL_S = 20.0
REPLACEMENTS = 5
REPLACEMENT_WINDOW_S = 300.0


class ReplicaFailedError(RuntimeError):
    """The service in this replica failed; Serve shows the text and replaces the replica."""


class Replica:
    """A Serve replica that hosts one service."""

    def __init__(self, make: Callable[[], Service], run: str, redis_url: str, workers: int) -> None:
        self._hosted = HostedService(make, run, redis_url, workers=workers)

    def check_health(self) -> None:
        """Called by Serve. Raises ReplicaFailedError when the service ended although nobody asked it to."""
        if fault := self._hosted.fault():
            raise ReplicaFailedError(fault)
        if self._hosted.done:
            raise ReplicaFailedError(f"{self._hosted.name} ended although its run goes on")

    def __del__(self) -> None:
        """Called by Serve once, before it ends the replica: leases go back to the stream."""
        if hasattr(self, "_hosted"):
            self._hosted.stop(DRAIN_S)


@dataclass
class Replacements:
    """Counts replicas that came although nobody asked for more: the bound on replacing for ever."""

    expected: int
    seen: set[str] = field(default_factory=set)
    times: deque[float] = field(default_factory=deque)

    def observe(self, replicas: set[str], now: float) -> int:
        """Note the replicas alive now; how many replacements happened in the last window (monotonic seconds)."""
        for replica in sorted(replicas - self.seen):
            self.seen.add(replica)
            if self.expected > 0:
                self.expected -= 1
            else:
                log.warning("replica %s replaces one that failed", replica)
                self.times.append(now)
        while self.times and now - self.times[0] > REPLACEMENT_WINDOW_S:
            self.times.popleft()
        return len(self.times)


def start_serve() -> None:
    """Start Serve without its HTTP proxy; harmless when it runs."""
    serve.start(proxy_location="Disabled")


def _client() -> Any:
    return _get_global_client()


def _details(application: str) -> dict[str, Any]:
    try:
        applications = _client().get_serve_details()["applications"]
    except RayServeException:
        return {}
    found: dict[str, Any] = applications.get(application, {})
    return found


class Fleet:
    """One fleet of one run. Its calls block (seconds at most): keep them off an event loop."""

    def __init__(self, run: str, name: str) -> None:
        self.name = name
        self._run = run
        self._application = f"{run}.{name}"
        self._target = 0
        self._replacements = Replacements(0)
        self._message = ""

    def start(
        self, make: Callable[[], Service], redis_url: str, *, replicas: int, workers: int, threads: int, cpus: float,
        gpus: float,
    ) -> None:  # fmt: skip
        """Deploy the fleet unless it runs; replicas start as resources allow."""
        self._target = replicas
        self._replacements = Replacements(replicas)
        if _details(self._application):
            return
        start_serve()
        deployment = serve.deployment(
            name=self.name,
            num_replicas=replicas,
            ray_actor_options={
                "num_cpus": cpus,
                "num_gpus": gpus,
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
        serve.run_many([target], wait_for_applications_running=False)

    def scale(self, replicas: int) -> None:
        """Change the number of replicas; those that stay go on undisturbed.

        Serve's external-scaler call changes the target alone. A new `serve.run` would give the deployment a new code
        version, and with it a restart of every replica.
        """
        if replicas == self._target:
            return
        identity = DeploymentID(name=self.name, app_name=self._application)
        ray.get(_client()._controller.update_deployment_replicas.remote(identity, replicas), timeout=CALL_S)
        self._replacements.expected += max(0, replicas - self._target)
        self._target = replicas

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as Serve knows them: replica_id, state, pid and more."""
        deployments = _details(self._application).get("deployments", {})
        found: list[dict[str, Any]] = deployments.get(self.name, {}).get("replicas", [])
        return found

    def fault(self) -> str | None:
        """Why the fleet cannot go on: Serve gave up, or replacing did not help. None while it can."""
        details = _details(self._application)
        deployment = details.get("deployments", {}).get(self.name, {})
        status = str(getattr(deployment.get("status"), "value", deployment.get("status", "")))
        message = _first_line(str(deployment.get("message", "")))
        self._message = message or self._message
        if status == "DEPLOY_FAILED" or str(details.get("status")) == "DEPLOY_FAILED":
            return f"{self.name} fleet: Ray Serve gave up: {message or _first_line(str(details.get('message', '')))}"
        alive = {str(one["replica_id"]) for one in deployment.get("replicas", [])}
        count = self._replacements.observe(alive, time.monotonic())
        if count > REPLACEMENTS:
            return f"{self.name} fleet: {count} replicas failed within {REPLACEMENT_WINDOW_S:g} s; {self._message}"
        return None

    def begin_stop(self) -> None:
        """Ask Serve to drain and end the fleet; returns at once."""
        if _details(self._application):
            serve.delete(self._application, _blocking=False)

    def gone(self) -> bool:
        """Whether Serve holds nothing of the fleet any more."""
        return not _details(self._application)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
