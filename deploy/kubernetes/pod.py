"""Owns a Ray pod as its first process sees it: Ray as a child, who is hosted, and an end in order.

Must not decide when the end comes, nor import ray: what Ray is asked is asked by deploy.hosting.node.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import time
from pathlib import Path

import psutil

from deploy.hosting.environment import cluster_environment
from deploy.hosting.pod_registry import VARIABLE, Resident, Residents
from deploy.process_tree import end_descendants

log = logging.getLogger(__name__)

COMMAND = "KUBERAY_GEN_RAY_START_CMD"
FOLDER = "/tmp/penstock-pod"
DRAIN_S = 25.0
"""How long hosted processes may drain; a service gives its leases back within 8 s."""
RAY_END_S = 10.0
POLL_S = 0.2
READY = "ready"


class PodError(RuntimeError):
    """The pod cannot do its work. One line."""


class Pod:
    """Ray's processes in this pod, and those that Ray hosts here. Use from one thread; the checks from any."""

    def __init__(self) -> None:
        folder = Path(os.environ.get(VARIABLE, FOLDER))
        self.residents = Residents(folder)
        self.residents.prepare()
        self._environment = {**cluster_environment(), VARIABLE: str(folder)}
        self._ray: subprocess.Popen[bytes] | None = None
        self.ending = False

    def start_ray(self) -> psutil.Process:
        """Start Ray as KubeRay's variable says; it stays this process's child. Raises PodError without one."""
        command = os.environ.get(COMMAND)
        if not command:
            raise PodError(
                f'{COMMAND} is not set; KubeRay sets it where the annotation ray.io/overwrite-container-cmd is "true"'
            )
        _raise_file_limit()
        log.info("starting Ray")
        self._ray = subprocess.Popen(["bash", "-c", f"exec {command}"], env=self._environment, start_new_session=True)
        return psutil.Process(self._ray.pid)

    def alive(self) -> str | None:
        """What stands against this pod's life: Ray has ended."""
        if self._ray is None:
            return None  # it is about to be started
        status = self._ray.poll()
        return None if status is None else f"Ray ended with status {status}"

    def unready(self) -> str | None:
        """What stands against this pod's service: its end, or a hosted process that is not ready."""
        if self.ending:
            return "the pod ends"
        waiting = [one for one in self.residents.all() if one.state != READY]
        return f"not ready: {_told(waiting)}" if waiting else self.alive()

    def drain(self) -> None:
        """Have every hosted process drain, for DRAIN_S seconds at most."""
        self.ending = True
        self.residents.drain()
        ends = time.monotonic() + DRAIN_S
        while (left := self.residents.all()) and not self.alive():
            if time.monotonic() > ends:
                log.warning("did not drain within %g s: %s", DRAIN_S, _told(left))
                return
            time.sleep(POLL_S)

    def end_ray(self) -> None:
        """End Ray and all that it has started here."""
        self.ending = True
        if killed := end_descendants(RAY_END_S):
            log.warning("had to kill %s", ", ".join(killed))

    def reap(self) -> None:
        """Collect the exit statuses of adopted children: the first process of a container inherits every orphan."""
        for child in psutil.Process().children():
            try:
                if child.status() == psutil.STATUS_ZOMBIE and (self._ray is None or child.pid != self._ray.pid):
                    os.waitpid(child.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                log.debug("process %d is gone already", child.pid)


def _told(residents: list[Resident]) -> str:
    return ", ".join(f"{one.service} of {one.run} (pid {one.pid}) is {one.state}" for one in residents)


def _raise_file_limit() -> None:
    """Ray needs many connections; containers often begin with 1,024 open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
