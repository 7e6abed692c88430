"""Owns the first process of a worker pod, `python -m deploy.kubernetes.node --role ROLE`.

Must not be used on a laptop, where `penstock up` starts everything.
On a node that cannot do the pod's work, it says why instead of starting Ray, and ends. It also ends the pod when all
that is left in it holds a place that a run avoids: Kubernetes then replaces it.
Drain order: nothing more is placed here -> hosted services release their leases -> Ray ends.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import time

import psutil

from deploy.hosting.environment import ROLES
from deploy.hosting.nodes.ray_node import Node, drain, joined, started_node
from deploy.kubernetes.node_facts import gpu_problem, label_variables, report
from deploy.kubernetes.pod import Pod, PodError, run_and_leave
from deploy.kubernetes.probes import PORT, Probes
from services.process.hosting import configure_logging

log = logging.getLogger(__name__)

JOIN_S = 300.0
"""How long Ray may take to join its cluster: the head may still be starting."""
NODE_DEADLINE_S = 60.0
"""The deadline given to Ray, by which the pod has ended (terminationGracePeriodSeconds is 90)."""
WATCH_S = 1.0
UNUSABLE_S = 60.0
"""How long a pod stays on a node that cannot do its work, so that it is seen there and not replaced in a tight loop."""


class Worker:
    """A worker pod, from start to end."""

    def __init__(self, role: str, port: int) -> None:
        self._role = role
        self._pod = Pod()
        self._node: Node | None = None
        self._problem = ""
        self._stopping = threading.Event()
        self._probes = Probes({"/healthz": self._pod.ray_problem, "/readyz": self._unready}, port)

    def stop(self, *_: object) -> None:
        """Drain and exit; the handler of SIGTERM and SIGINT."""
        self._stopping.set()

    def run(self) -> int:
        """Start Ray, and run until a signal arrives or the pod has to end; returns the exit status. Raises PodError."""
        if problem := gpu_problem():
            return self._unusable(problem)
        ray = self._pod.start_ray(**label_variables())
        status = 0
        try:
            self._join(ray)
            while not self._stopping.wait(WATCH_S):
                self._pod.reap()
                if problem := self._pod.ray_problem():
                    raise PodError(problem)
                if reason := self._pod.registry.end_reason():
                    log.error("this pod ends, and is replaced: %s", reason)
                    report(self._role, reason, to_runs=False)
                    status = 1
                    break
            else:
                log.info("received a signal to stop; draining")
            self._pod.ending = True
            if self._node is not None:
                drain(self._node, NODE_DEADLINE_S)
            self._pod.drain()
        finally:
            self._pod.end_ray()
            self._probes.close()
        log.info("drained and stopped")
        return status

    def _unusable(self, problem: str) -> int:
        """Say why the node cannot do the pod's work, and end after a while: KubeRay replaces the pod at once."""
        log.error("%s; this pod ends in %g s", problem, UNUSABLE_S)
        self._problem = problem
        report(self._role, problem)
        self._stopping.wait(UNUSABLE_S)
        self._probes.close()
        return 1

    def _join(self, ray: psutil.Process) -> None:
        """Wait until Ray lists this node as alive. Raises PodError after JOIN_S seconds, or when Ray ends."""
        ends = time.monotonic() + JOIN_S
        while not self._stopping.wait(WATCH_S):
            if problem := self._pod.ray_problem():
                raise PodError(problem)
            node = started_node(ray)
            if node is not None and joined(node):
                self._node = node
                log.info("%s node %s joined the cluster at %s", self._role, node.id, node.gcs)
                return
            if time.monotonic() > ends:
                raise PodError(f"Ray has not joined its cluster within {JOIN_S:g} s")

    def _unready(self) -> str | None:
        if self._problem:
            return self._problem
        return self._pod.readiness_problem() if self._node is not None else "Ray has not joined its cluster yet"


def main() -> int:
    """Run until SIGTERM; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.node")
    parser.add_argument("--role", required=True, choices=[role for role in ROLES if role != "head"])
    parser.add_argument("--probe-port", type=int, default=PORT)
    arguments = parser.parse_args()
    configure_logging(f"{arguments.role}-node")
    worker = Worker(arguments.role, arguments.probe_port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    try:
        return worker.run()
    except PodError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    run_and_leave(main)
