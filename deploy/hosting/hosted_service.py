"""Owns one hosted service inside its process: log file, health, draining.

Must not import ray, nor restart a failed service.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deploy.hosting.pod_registry import POD_DRAIN_S, PodRegistry
from services.contracts import ProcessInfo
from services.contracts.listening import advertised_host
from services.process.hosting import GRACE_S, Service, ServiceThread, configure_logging
from services.storage.places import runs_folder

log = logging.getLogger(__name__)

DRAIN_S = GRACE_S
WATCH_S = 0.5


def write_log(run: str, name: str) -> Path:
    """Write this process's log to `runs/RUN/logs/NAME-HOST-PID.log` as well as to standard error; returns the file.

    HOST is left out on a laptop. Pods may share the folder, and their process ids may be equal.
    """
    configure_logging(name)
    pod = [socket.gethostname()] if PodRegistry.current() else []
    file = runs_folder() / run / "logs" / f"{'-'.join([name, *pod, str(os.getpid())])}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return file


def free_address() -> tuple[str, int]:
    """A host and free port of this machine. Another process may take the port before it is used."""
    host = advertised_host()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])


class HostedService:
    """A service in a thread of this process. With `exit_on_fault` the process exits when the service fails."""

    def __init__(
        self, make: Callable[[], Service], run: str, redis_url: str, *, workers: int = 1, exit_on_fault: bool = False
    ) -> None:
        service = make()
        self.name = service.name
        self.log_file = write_log(run, service.name)
        self._asked_to_stop = False
        self._registry = PodRegistry.current()
        announce = self._registry.announce if self._registry else _announce_nothing
        self._thread = ServiceThread(service, run, redis_url, workers, announce)
        self._exits_on_fault = exit_on_fault
        threading.Thread(target=self._watch, name=f"{service.name}-watch", daemon=True).start()

    def _watch(self) -> None:
        """Drain when the pod drains; exit when the service fails, if so configured."""
        while self._thread.alive:
            if self._registry and self._registry.draining and not self._asked_to_stop:
                log.info("the pod drains; draining %s", self.name)
                self.stop(POD_DRAIN_S)
            time.sleep(WATCH_S)
        if self._registry:
            self._registry.withdraw()
        if self._exits_on_fault and self.fault():
            log.error("%s; this process exits and is replaced", self.fault())
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
        """Drain; returns whether the service ended within `deadline_s` seconds."""
        self._asked_to_stop = True
        drained = self._thread.stop(deadline_s)
        if not drained:
            log.warning("%s did not drain within %g s", self.name, deadline_s)
        return drained


def _announce_nothing(_: ProcessInfo) -> None:
    """A laptop has no registry of hosted processes."""
