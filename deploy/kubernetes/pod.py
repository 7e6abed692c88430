"""Owns a Ray pod as its first process sees it: Ray as a child process, the hosted processes, and an orderly end.

Must not decide when to end, nor import ray; deploy.hosting.nodes.ray_node queries Ray.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from deploy.hosting.environment import cluster_environment
from deploy.hosting.pod_registry import POD_DRAIN_S, VARIABLE, PodProcess, PodRegistry
from deploy.process_tree import end_descendants
from services.process.teardown import exit_now

log = logging.getLogger(__name__)

COMMAND = "KUBERAY_GEN_RAY_START_CMD"
FOLDER = "/tmp/penstock-pod"
RAY_END_S = 10.0
POLL_S = 0.2
READY = "ready"


class PodError(RuntimeError):
    """The pod cannot do its work. The text is one line."""


class Pod:
    """Ray's processes in this pod, and those that Ray hosts here. Use from one thread; `*_problem` from any."""

    def __init__(self) -> None:
        folder = Path(os.environ.get(VARIABLE, FOLDER))
        self.registry = PodRegistry(folder)
        self.registry.clear()
        self._environment = {**cluster_environment(), VARIABLE: str(folder)}
        self._ray: subprocess.Popen[bytes] | None = None
        self.ending = False

    def start_ray(self, **variables: str) -> psutil.Process:
        """Start Ray with the command in KubeRay's variable, as a child process. Raises PodError if it is not set.

        `variables`: more of Ray's environment.
        """
        command = os.environ.get(COMMAND)
        if not command:
            raise PodError(
                f'{COMMAND} is not set; KubeRay sets it where the annotation ray.io/overwrite-container-cmd is "true"'
            )
        _raise_file_limit()
        log.info("starting Ray")
        self._ray = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], env=self._environment | variables, start_new_session=True
        )
        return psutil.Process(self._ray.pid)

    def ray_problem(self) -> str | None:
        """Why this pod has failed: Ray has ended; else None."""
        if self._ray is None:
            return None  # not started yet
        status = self._ray.poll()
        return None if status is None else f"Ray ended with status {status}"

    def readiness_problem(self) -> str | None:
        """Why this pod is not ready: it is ending, a hosted process is not ready, or Ray has ended; else None."""
        if self.ending:
            return "the pod is ending"
        waiting = [process for process in self.registry.processes() if process.state != READY]
        return f"not ready: {_listed(waiting)}" if waiting else self.ray_problem()

    def drain(self) -> None:
        """Drain every hosted process, for at most POD_DRAIN_S seconds."""
        self.ending = True
        self.registry.request_drain()
        ends = time.monotonic() + POD_DRAIN_S
        while (left := self.registry.processes()) and not self.ray_problem():
            if time.monotonic() > ends:
                log.warning("did not drain within %g s: %s", POD_DRAIN_S, _listed(left))
                return
            time.sleep(POLL_S)

    def end_ray(self) -> None:
        """End Ray and all processes that it has started here."""
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
                log.debug("process %d has ended already", child.pid)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run the first process of a pod, and end it with the status that `main` returns, without tearing Python down.

    Threads of Ray's client are native and outlive their client. If the control store ended at the same moment, as when
    all pods of a cluster are deleted, one of them was seen to crash the interpreter at its exit (signal 11), which
    makes an orderly end look like a failed pod. Nothing is left to tear down: all children have ended.
    """
    try:
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        log.exception("the first process of this pod failed")
        status = 1
    exit_now(status)


def _listed(processes: list[PodProcess]) -> str:
    return ", ".join(
        f"{process.service} of {process.run} (pid {process.pid}) is {process.state}" for process in processes
    )


def _raise_file_limit() -> None:
    """Raise the limit on open files to the hard limit: Ray needs many connections, containers often start at 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
