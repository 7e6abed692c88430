"""Owns the registry of a pod's hosted processes: files in a folder, read by the pod's first process.

Must not import ray, nor be used on a laptop, where no pod reads it.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from services.contracts import ProcessInfo
from services.streams.runs.places import AVOIDED

log = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_POD"
POD_DRAIN_S = 50.0
"""How long hosted processes may drain: a replica takes seconds, a learner writes a checkpoint."""
DRAINING = "draining"
ENDING = ".ending"
"""How the name of a process's request to end the pod ends."""


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
        """Remove this process, and its request to end the pod; no effect if it is not registered."""
        (self._folder / f"{os.getpid()}.json").unlink(missing_ok=True)
        self.withdraw_end()

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
        """Ask the pod's first process to end the pod, unless it does other work; `reason`: one line.

        The request holds while this process lives.
        """
        file = self._folder / f"{os.getpid()}{ENDING}"
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps({"started": _started(os.getpid()), "reason": reason}))
        partial.rename(file)

    def withdraw_end(self) -> None:
        """Take this process's request back; no effect if there is none."""
        (self._folder / f"{os.getpid()}{ENDING}").unlink(missing_ok=True)

    def end_reason(self) -> str | None:
        """Why the pod is to end: a process asks for it, and all of them only hold avoided places; else None."""
        reasons = [reason for file in sorted(self._folder.glob(f"*{ENDING}")) if (reason := _requested(file))]
        held = all(process.state == AVOIDED for process in self.processes())
        return reasons[0] if reasons and held else None

    def request_drain(self) -> None:
        """Ask all processes to drain."""
        (self._folder / DRAINING).touch()

    @property
    def draining(self) -> bool:
        """Whether all processes were asked to drain."""
        return (self._folder / DRAINING).exists()


def _requested(file: Path) -> str | None:
    """The reason of a request to end the pod; None without the process that wrote it, and the file is removed then."""
    try:
        request = json.loads(file.read_text())
    except FileNotFoundError:
        log.debug("%s has just been withdrawn", file.name)
        return None
    with suppress(FileNotFoundError, ProcessLookupError):
        # Another process may have its id by now.
        if _started(int(file.stem)) == request["started"]:
            return str(request["reason"])
    log.warning("the process that asked to end this pod has died: %s", request["reason"])
    file.unlink(missing_ok=True)
    return None


def _started(pid: int) -> str:
    """When a process started, in ticks since the boot (proc(5), field 22 of stat): no change of the clock moves it.

    Raises FileNotFoundError or ProcessLookupError if there is none.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
