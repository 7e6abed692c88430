"""Owns a Ray session: Ray itself on a laptop, and everywhere Serve, the gateway and its supervision.

Must not start Ray in a pod, where it runs already.
"""

from __future__ import annotations

import logging
import math
import secrets
import signal
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError

from deploy.hosting.actors import Restarts, actor_state
from deploy.hosting.environment import NAMESPACE, ROLES, serving
from deploy.hosting.fleet import start_serve
from deploy.hosting.gateway import start_gateway
from deploy.hosting.nodes.deaths import EARLY_DEATHS
from deploy.hosting.ray_internals import local_node_options, patient_start, use_token

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 * 2**20
TOKEN_BYTES = 32
NODE_START_S = 150.0


class GatewayFailedError(RuntimeError):
    """The gateway died several times in a row before it served."""


class RayLostError(RuntimeError):
    """Ray no longer restarts the gateway: the node on which it ran is lost."""


class GatewayStatus(Enum):
    """The status of the gateway. SILENT: its process runs but does not answer."""

    SERVES = "serves"
    STARTS = "has been starting"
    SILENT = "has not answered"


# How long the gateway may take to start, waiting for Redis included; how long its process may go without an answer.
PATIENCE_S = {GatewayStatus.STARTS: 120.0, GatewayStatus.SILENT: 20.0, GatewayStatus.SERVES: math.inf}
PING_S = 5.0
WATCH_S, START_WATCH_S = 1.0, 0.1
"""How often the gateway is looked at, and until it serves for the first time."""


def start_ray(folder: Path, cores: int, free_ports: Callable[[int], list[int]]) -> None:
    """Start a new Ray cluster, never join a running one. `folder`: a short path, for its sockets and its token.

    It listens on the loopback interface, which every user of the machine reaches, so it answers only to a new token,
    in a file in `folder` that only this user can read. `free_ports` returns as many different free ports as it is
    asked for. Raises NodeStartError when the node does not start within NODE_START_S seconds.
    """
    token = folder / "auth-token"
    token.touch(mode=0o600, exist_ok=False)
    token.write_text(secrets.token_hex(TOKEN_BYTES))
    use_token(token)
    with patient_start(NODE_START_S, free_ports):
        _init(
            address="local",
            num_cpus=cores,
            resources=serving(*ROLES),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **local_node_options("127.0.0.1", folder),  # a laptop may change networks while Ray runs
        )


def join_ray() -> None:
    """Become a driver of the Ray cluster that runs in this pod already."""
    _init(address="auto")


def _init(**options: Any) -> None:
    """Call ray.init and restore our handler of SIGTERM, which ray.init replaces by one that aborts."""
    ours = signal.getsignal(signal.SIGTERM)
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    signal.signal(signal.SIGTERM, ours)


class Session:
    """Serve and the gateway on a running Ray, from start to end. `listen`: host and port of the API, if any."""

    def __init__(self, redis_url: str, listen: tuple[str, int] | None) -> None:
        self._gateway: Any = start_gateway(redis_url, listen)
        self._restarts = Restarts()
        start_serve()  # while the gateway loads; otherwise the first run has to wait for it

    def check(self, deadline_s: float) -> GatewayStatus:
        """The status of the gateway, within `deadline_s` seconds. Raises GatewayFailedError, RayLostError."""
        try:
            serves = bool(ray.get(self._gateway.serves.remote(), timeout=deadline_s))
            seen = GatewayStatus.SERVES if serves else GatewayStatus.STARTS
        except (GetTimeoutError, RayActorError):
            seen = GatewayStatus.SILENT
        state = actor_state(self._gateway)
        early = self._restarts.observe(state, {state.process} if seen is GatewayStatus.SERVES and state.process else ())
        if state.dead:
            raise RayLostError("Ray no longer restarts the gateway: its node is lost")
        if early > EARLY_DEATHS:
            raise GatewayFailedError(
                f"the gateway died {early} times in a row before it served; its log shows the reason"
            )
        return seen if state.alive else GatewayStatus.STARTS

    def watch(self, served: Callable[[], None], check: Callable[[], None] = lambda: None) -> NoReturn:
        """Supervise the gateway and replace one that hangs. `served` is called once, when the gateway first serves.

        `check` is called each second, more often until then. Raises GatewayFailedError, RayLostError, and what `check`
        raises.
        """
        ready, seen, since = False, GatewayStatus.STARTS, time.monotonic()
        while True:
            check()
            state = self.check(PING_S)
            if state is not seen:
                seen, since = state, time.monotonic()
            if state is GatewayStatus.SERVES and not ready:
                ready = True
                served()
            if time.monotonic() - since > PATIENCE_S[state]:
                log.warning("the gateway %s for %g s; its process is restarted", state.value, PATIENCE_S[state])
                self.restart_gateway()
                since = time.monotonic()
            time.sleep(WATCH_S if ready else START_WATCH_S)

    def restart_gateway(self) -> None:
        """Kill the gateway's process, whatever it is doing; Ray restarts it, and it finds all runs and processes."""
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
