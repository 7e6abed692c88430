"""Owns the local Ray session: starting and ending Ray, Serve and the gateway on this machine.

Must not be used on a cluster, where Ray is there already.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from deploy.hosting.environment import NAMESPACE
from deploy.hosting.fleet import start_serve
from deploy.hosting.gateway import start_gateway

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 * 2**20


class GatewayFailedError(RuntimeError):
    """The gateway died more often than it is restarted."""


def start_ray(folder: Path, cores: int) -> None:
    """Start a Ray of our own (never one that runs already). `folder`: a short path, for its sockets."""
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=cores,
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
        start_serve()  # while the gateway loads; the first run would have to wait for it

    def check(self, deadline_s: float) -> bool:
        """Whether the gateway answers. Raises GatewayFailedError when it is dead for good."""
        try:
            ray.get(self._gateway.ping.remote(), timeout=deadline_s)
        except ActorDiedError:
            raise GatewayFailedError("the gateway failed for good; its log tells why") from None
        except (GetTimeoutError, RayActorError):
            return False
        return True

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
