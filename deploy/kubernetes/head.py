"""Owns the first process of the head pod: `python -m deploy.kubernetes.head`; Ray's control store, and the controller.

Must not end runs when it ends: their processes live in other pods, and the next head finds them there.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from types import FrameType

import psutil

from deploy.hosting.node import joined, started_node
from deploy.kubernetes.pod import Pod, PodError
from deploy.kubernetes.probes import PORT, Probes
from services.process import add_redis_option, configure_logging

log = logging.getLogger(__name__)

START_S = 180.0
"""How long Ray's control store may take: it reads what it knows from Redis first."""
SILENT_S = 120.0
"""After so long without a look at the controller, this process hangs and is replaced."""
WATCH_S = 1.0


class Head:
    """The head pod's life."""

    def __init__(self, redis_url: str, port: int) -> None:
        self._redis_url = redis_url
        self._pod = Pod()
        self._serving = False
        self._looked_at = time.monotonic()
        self._probes = Probes({"/healthz": self._dead, "/readyz": self._unready}, port)

    def stop(self, number: int, _: FrameType | None) -> None:
        """End; the handler of SIGTERM."""
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    def run(self) -> None:
        """Start Ray and the controller, and watch over both. Raises PodError, GatewayFailedError, RayLostError."""
        try:
            self._await_ray(self._pod.start_ray())
            from deploy.hosting.session import Session, join_ray

            join_ray()
            self._serving = True
            session = Session(self._redis_url, None)
            log.info("Ray is up; the controller starts")
            session.watch(lambda: log.info("the controller runs"), self._look)
        finally:
            self._pod.end_ray()
            self._probes.close()

    def _await_ray(self, ray: psutil.Process) -> None:
        ends = time.monotonic() + START_S
        while not ((node := started_node(ray)) and joined(node)):
            self._look()
            if time.monotonic() > ends:
                raise PodError(f"Ray's control store does not answer after {START_S:g} s")
            time.sleep(WATCH_S)

    def _look(self) -> None:
        self._pod.reap()
        self._looked_at = time.monotonic()
        if against := self._pod.alive():
            raise PodError(against)

    def _dead(self) -> str | None:
        silent_s = time.monotonic() - self._looked_at
        return self._pod.alive() or (f"no look at the controller for {silent_s:.0f} s" if silent_s > SILENT_S else None)

    def _unready(self) -> str | None:
        # Not the controller: workers join through this pod's service, whatever the controller waits for.
        return self._pod.alive() or (None if self._serving else "Ray's control store does not answer yet")


def main() -> int:
    """Run until SIGTERM; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.head")
    add_redis_option(parser)
    parser.add_argument("--probe-port", type=int, default=PORT)
    arguments = parser.parse_args()
    configure_logging("head")
    head = Head(arguments.redis, arguments.probe_port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, head.stop)
    try:
        head.run()
    except PodError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
