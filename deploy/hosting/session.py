"""Owns the local Ray session: starting and ending Ray, Serve and the gateway on this machine.

Must not be used on a cluster, where Ray is there already.
"""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError

from deploy.hosting.actors import EARLY_DEATHS, Restarts, actor_state
from deploy.hosting.environment import NAMESPACE, ROLES, serving
from deploy.hosting.fleet import start_serve
from deploy.hosting.gateway import start_gateway

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 * 2**20


class GatewayFailedError(RuntimeError):
    """The gateway dies again and again without having come to serve."""


class RayLostError(RuntimeError):
    """Ray does not restart what it was told to restart: the node on which this process started it is lost."""


class Gateway(Enum):
    """What the gateway is seen to do. SILENT: its process is there, but says nothing."""

    SERVES = "serves"
    STARTS = "starts"
    SILENT = "is silent"


def start_ray(folder: Path, cores: int) -> None:
    """Start a Ray of our own (never one that runs already). `folder`: a short path, for its sockets."""
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=cores,
        resources=serving(*ROLES),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",  # a laptop changes networks while Ray runs
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    )


class Session:
    """Ray, Serve and the gateway, from start to end."""

    def __init__(self, redis_url: str, host: str, port: int) -> None:
        self._gateway: Any = start_gateway(redis_url, host, port)
        self._restarts = Restarts()
        start_serve()  # while the gateway loads; the first run would have to wait for it

    def check(self, deadline_s: float) -> Gateway:
        """What the gateway does. Raises GatewayFailedError, RayLostError."""
        try:
            serves = bool(ray.get(self._gateway.serves.remote(), timeout=deadline_s))
            seen = Gateway.SERVES if serves else Gateway.STARTS
        except (GetTimeoutError, RayActorError):
            seen = Gateway.SILENT
        state = actor_state(self._gateway)
        early = self._restarts.observe(state, {state.process} if seen is Gateway.SERVES and state.process else ())
        if state.dead:
            raise RayLostError("the gateway is dead for good, which only a lost node explains")
        if early > EARLY_DEATHS:
            raise GatewayFailedError(f"the gateway died {early} times in a row before it served; its log tells why")
        return seen if state.alive else Gateway.STARTS

    def restart_gateway(self) -> None:
        """Kill the gateway's process, whatever it does; Ray starts another, which finds everything again."""
        ray.kill(self._gateway, no_restart=False)

    def stop(self, deadline_s: float) -> None:
        """Drain the runs for at most `deadline_s` seconds, then end the gateway and Serve."""
        try:
            ray.get(self._gateway.stop.remote(deadline_s - 1), timeout=deadline_s)
        except (GetTimeoutError, RayActorError) as error:
            log.warning("the gateway did not drain: %s", type(error).__name__)
        ray.kill(self._gateway, no_restart=True)
        serve.shutdown()


def stop_ray() -> None:
    """End Ray's processes."""
    ray.shutdown()
