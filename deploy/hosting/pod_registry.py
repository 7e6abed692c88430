"""Owns what the hosted processes of one pod and the pod's first process tell each other: files in a folder of the pod.

Must not import ray, nor be used where one machine is the whole cluster: there nobody asks.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

import psutil

from services.contracts import ProcessInfo

log = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_POD"
DRAINING = "draining"


class Resident(NamedTuple):
    """A hosted process as it announced itself last."""

    pid: int
    service: str
    run: str
    state: str


class Residents:
    """The processes that are hosted in this pod. Every one of them writes its own file, by its process id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def here(cls) -> Residents | None:
        """Those of this pod; None where there is none."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder)) if folder else None

    def prepare(self) -> None:
        """Begin anew, with nobody: a container that is restarted keeps its volumes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    def announce(self, info: ProcessInfo) -> None:
        """Say what this process is, and how far."""
        file = self._folder / f"{os.getpid()}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"service": info.service, "run": info.run or "", "state": info.state}))
        partial.rename(file)

    def withdraw(self) -> None:
        """Say that this process hosts nothing any more; harmless twice."""
        (self._folder / f"{os.getpid()}.json").unlink(missing_ok=True)

    def all(self) -> list[Resident]:
        """Everybody who is there; who died without a word is forgotten."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            pid = int(file.stem)
            if not psutil.pid_exists(pid):
                log.warning("process %d of this pod has died", pid)
                file.unlink(missing_ok=True)
                continue
            try:
                found.append(Resident(pid, **json.loads(file.read_text())))
            except FileNotFoundError:
                log.debug("process %d has just withdrawn", pid)
        return found

    def drain(self) -> None:
        """Ask everybody to drain."""
        (self._folder / DRAINING).touch()

    @property
    def draining(self) -> bool:
        """Whether everybody was asked to drain."""
        return (self._folder / DRAINING).exists()
