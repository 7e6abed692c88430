"""Owns one hosted service inside its process: log file, health, draining.

Must not import ray, nor decide who replaces a failed service.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deploy.hosting.pod_registry import Residents
from services.contracts import ProcessInfo
from services.process import Service, ServiceThread, advertised_host, configure_logging
from services.storage.places import runs_folder

log = logging.getLogger(__name__)

DRAIN_S = 8.0
WATCH_S = 0.5


def write_log(run: str, name: str) -> Path:
    """Send this process's log to `runs/RUN/logs/NAME-HOST-PID.log` as well as to standard error; the file.

    On a laptop without HOST; pods may share the folder, and their process ids are alike.
    """
    configure_logging(name)
    pod = [socket.gethostname()] if Residents.here() else []
    file = runs_folder() / run / "logs" / f"{'-'.join([name, *pod, str(os.getpid())])}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return file


def free_address() -> tuple[str, int]:
    """A host:port on which this machine can be reached. Another process may take it before we listen on it."""
    host = advertised_host()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])


class HostedService:
    """A service in a thread of this process. `exit_on_fault` ends the process with it, so that it is restarted."""

    def __init__(
        self, make: Callable[[], Service], run: str, redis_url: str, *, workers: int = 1, exit_on_fault: bool = False
    ) -> None:
        service = make()
        self.name = service.name
        self.log_file = write_log(run, service.name)
        self._asked_to_stop = False
        self._residents = Residents.here()
        told = self._residents.announce if self._residents else _nobody
        self._thread = ServiceThread(service, run, redis_url, workers, told)
        self._exits_on_fault = exit_on_fault
        threading.Thread(target=self._watch, name=f"{service.name}-watch", daemon=True).start()

    def _watch(self) -> None:
        """Drain with the pod, and exit with a fault."""
        while self._thread.alive:
            if self._residents and self._residents.draining and not self._asked_to_stop:
                log.info("the pod ends; %s drains", self.name)
                self.stop()
            time.sleep(WATCH_S)
        if self._residents:
            self._residents.withdraw()
        if self._exits_on_fault and self.fault():
            log.error("%s; this process exits so that another one takes over", self.fault())
            logging.shutdown()
            os._exit(1)

    @property
    def done(self) -> bool:
        """Whether the service ended."""
        return not self._thread.alive

    def fault(self) -> str | None:
        """One line when the service failed, else None."""
        error = self._thread.error
        if error is None or self._asked_to_stop:
            return None
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return f"{self.name} (pid {os.getpid()}) failed: {text} (log: {self.log_file})"

    def stop(self, deadline_s: float = DRAIN_S) -> bool:
        """Drain; whether the service ended within `deadline_s` seconds."""
        self._asked_to_stop = True
        drained = self._thread.stop(deadline_s)
        if not drained:
            log.warning("%s did not drain within %g s", self.name, deadline_s)
        return drained


def _nobody(_: ProcessInfo) -> None:
    """On a laptop no pod waits for the news."""
