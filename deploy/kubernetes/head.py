"""Owns the first process of the head pod, `python -m deploy.kubernetes.head`: Ray's control store and the controller.

Must not end runs when it ends: their processes are in other pods, where the next head finds them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from types import FrameType
from urllib.parse import quote

import psutil

from deploy.hosting.nodes.ray_node import StoreWatch, joined, started_node
from deploy.kubernetes.pod import Pod, PodError, run_and_leave
from deploy.kubernetes.probes import PORT, Probes
from services.process.hosting import add_redis_option, configure_logging
from services.streams.connection.client import RedisUnavailableError, server_id
from services.streams.connection.url import parse_redis_url

log = logging.getLogger(__name__)

START_S = 180.0
"""How long Ray's control store may take to start: it first loads its state from Redis."""
SILENT_S = 120.0
"""After this many seconds without a check of the controller, the liveness probe fails and the pod is restarted."""
WATCH_S = 1.0
SERVER_S = 5.0
RAY_ADDRESS, RAY_USER, RAY_PASSWORD = "RAY_REDIS_ADDRESS", "REDIS_USERNAME", "REDIS_PASSWORD"
"""Variables that KubeRay sets in the head pod, and `ray start` reads."""


class Head:
    """The head pod, from start to end. Raises ValueError for an address of Redis that cannot be used."""

    def __init__(self, redis_url: str, port: int) -> None:
        self._redis_url = redis_url
        self._store_url = control_store_url(redis_url)
        self._pod = Pod()
        self._serving = False
        self._store: StoreWatch | None = None
        self._checked_at = time.monotonic()
        self._probes = Probes({"/healthz": self._dead, "/readyz": self._unready}, port)

    def stop(self, number: int, _: FrameType | None) -> None:
        """Exit; the handler of SIGTERM and SIGINT."""
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    def run(self) -> None:
        """Start Ray and the controller, and supervise both. Raises PodError, GatewayFailedError, RayLostError."""
        try:
            server = self._server()  # before the control store connects, so that no failover passes unseen
            self._await_ray(self._pod.start_ray(), server)
            from deploy.hosting.session import Session, join_ray

            join_ray()
            self._serving = True
            session = Session(self._redis_url, None)
            log.info("Ray is up; starting the controller")
            session.watch(lambda: log.info("the controller runs"), self._check)
        finally:
            if self._store:
                self._store.close()
            self._pod.end_ray()
            self._probes.close()

    def _await_ray(self, ray: psutil.Process, server: str | None) -> None:
        ends = time.monotonic() + START_S
        while not ((node := started_node(ray)) and joined(node)):
            self._check()
            if time.monotonic() > ends:
                raise PodError(f"Ray's control store has not answered within {START_S:g} s")
            time.sleep(WATCH_S)
        self._store = StoreWatch(node, self._server, server)

    def _server(self) -> str | None:
        try:
            return asyncio.run(server_id(self._store_url, SERVER_S))
        except RedisUnavailableError as error:
            log.info("the server of Ray's state does not say which it is: %s", error)
            return None

    def _check(self) -> None:
        self._pod.reap()
        self._checked_at = time.monotonic()
        if problem := self._ray_problem():
            raise PodError(problem)

    def _ray_problem(self) -> str | None:
        return self._pod.ray_problem() or (self._store.problem if self._store else None)

    def _dead(self) -> str | None:
        silent_s = time.monotonic() - self._checked_at
        hangs = f"the controller has not been checked for {silent_s:.0f} s" if silent_s > SILENT_S else None
        return self._ray_problem() or hangs

    def _unready(self) -> str | None:
        # The controller does not count: workers join through this pod's service, whatever the controller waits for.
        return self._pod.ray_problem() or (None if self._serving else "Ray's control store does not answer yet")


def control_store_url(redis_url: str) -> str:
    """The Redis of Ray's control store, from the variables of `ray start`; without them the platform's, `redis_url`.

    Behind Sentinels it is the platform's as well: Ray's own address then leads to the same primary, or is a Sentinel's.
    Raises ValueError for a `redis_url` that is not valid, where Ray has its address.
    """
    address = os.environ.get(RAY_ADDRESS)
    if not address or parse_redis_url(redis_url).service:
        return redis_url
    scheme, _, place = address.rpartition("://")
    user, password = (quote(os.environ.get(variable, ""), safe="") for variable in (RAY_USER, RAY_PASSWORD))
    return f"{scheme or 'redis'}://{user}:{password}@{place}" if password else address


def main() -> int:
    """Run until SIGTERM; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.head")
    add_redis_option(parser)
    parser.add_argument("--probe-port", type=int, default=PORT)
    arguments = parser.parse_args()
    configure_logging("head")
    try:
        head = Head(arguments.redis, arguments.probe_port)
    except ValueError as error:
        log.error("%s", error)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, head.stop)
    try:
        head.run()
    except PodError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    run_and_leave(main)
