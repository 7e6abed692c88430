"""Owns a Ray session: Ray itself on a laptop, Serve and the gateway everywhere, and the watch over the gateway.

Must not start Ray in a pod, where it is there already.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

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


# How long the gateway may start, wait for Redis among other things; how long its process may be there without a word.
PATIENCE_S = {Gateway.STARTS: 120.0, Gateway.SILENT: 20.0, Gateway.SERVES: math.inf}
PING_S = 5.0
WATCH_S = 1.0


def start_ray(folder: Path, cores: int) -> None:
    """Start a Ray of our own (never one that runs already). `folder`: a short path, for its sockets."""
    _init(
        address="local",
        num_cpus=cores,
        resources=serving(*ROLES),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",  # a laptop changes networks while Ray runs
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    )


def join_ray() -> None:
    """Become a driver of the Ray that runs in this pod already."""
    _init(address="auto")


def _init(**options: Any) -> None:
    """ray.init, which puts handlers of its own for SIGTERM in the place of ours; on one it aborts."""
    ours = signal.getsignal(signal.SIGTERM)
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    signal.signal(signal.SIGTERM, ours)


class Session:
    """Serve and the gateway on a Ray that runs, from start to end. `listen`: where the gateway serves the API, if it
    does."""

    def __init__(self, redis_url: str, listen: tuple[str, int] | None) -> None:
        self._gateway: Any = start_gateway(redis_url, listen)
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

    def watch(self, served: Callable[[], None], look: Callable[[], None] = lambda: None) -> NoReturn:
        """Call `served` when the gateway serves for the first time; replace one that hangs. `look` is called each time.

        Raises GatewayFailedError, RayLostError, and what `look` raises.
        """
        ready, seen, since = False, Gateway.STARTS, time.monotonic()
        while True:
            look()
            state = self.check(PING_S)
            if state is not seen:
                seen, since = state, time.monotonic()
            if state is Gateway.SERVES and not ready:
                ready = True
                served()
            if time.monotonic() - since > PATIENCE_S[state]:
                log.warning("the gateway %s for %g s; its process is replaced", state.value, PATIENCE_S[state])
                self.restart_gateway()
                since = time.monotonic()
            time.sleep(WATCH_S)

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
