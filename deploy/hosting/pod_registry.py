"""Owns the registry of a pod's hosted processes: files in a folder, read by the pod's first process.

Must not import ray, nor be used on a laptop, where no pod reads it.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

import psutil

from services.contracts import ProcessInfo
from services.streams.runs.places import AVOIDED

log = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_POD"
POD_DRAIN_S = 50.0
"""How long hosted processes may drain: a replica takes seconds, a learner writes a checkpoint."""
DRAINING, ENDING = "draining", "ending"


class PodProcess(NamedTuple):
    """A hosted process as it last announced itself."""

    pid: int
    service: str
    run: str
    state: str


class PodRegistry:
    """The processes that are hosted in this pod. Each one writes its own file, named after its process id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def current(cls) -> PodRegistry | None:
        """The registry of this pod; None outside a pod."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder else None

    def clear(self) -> None:
        """Create the folder, or empty it: a restarted container keeps its volumes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    def announce(self, info: ProcessInfo) -> None:
        """Write the service, run and state of this process."""
        file = self._folder / f"{os.getpid()}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"service": info.service, "run": info.run or "", "state": info.state}))
        partial.rename(file)

    def withdraw(self) -> None:
        """Remove this process; no effect if it is not registered."""
        (self._folder / f"{os.getpid()}.json").unlink(missing_ok=True)

    def processes(self) -> list[PodProcess]:
        """All registered processes; those that died are removed."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            pid = int(file.stem)
            if not psutil.pid_exists(pid):
                log.warning("process %d of this pod has died", pid)
                file.unlink(missing_ok=True)
                continue
            try:
                found.append(PodProcess(pid, **json.loads(file.read_text())))
            except FileNotFoundError:
                log.debug("process %d has just withdrawn", pid)
        return found

    def request_end(self, reason: str) -> None:
        """Ask the pod's first process to end the pod, unless it does other work; `reason`: one line."""
        partial = self._folder / f"{ENDING}.partial"
        partial.write_text(reason)
        partial.rename(self._folder / ENDING)

    def withdraw_end(self) -> None:
        """Take the request back; no effect if there is none."""
        (self._folder / ENDING).unlink(missing_ok=True)

    def end_reason(self) -> str | None:
        """Why the pod is to end: it was asked to, and its processes only hold avoided places; else None."""
        try:
            reason = (self._folder / ENDING).read_text()
        except FileNotFoundError:
            return None
        return reason if all(process.state == AVOIDED for process in self.processes()) else None

    def request_drain(self) -> None:
        """Ask all processes to drain."""
        (self._folder / DRAINING).touch()

    @property
    def draining(self) -> bool:
        """Whether all processes were asked to drain."""
        return (self._folder / DRAINING).exists()
