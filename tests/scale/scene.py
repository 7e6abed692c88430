"""Owns the facts of a run at scale, read by raw commands: readiness, work done, connections.

Must not import the code under test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.chaos import lookups
from tests.harness.stubs.stack import Kept, StubStack

LOOK_S = 0.1


class Connections:
    """The most connections that the server has had, observed ten times a second. Use as a context manager."""

    def __init__(self, url: str) -> None:
        self._server = lookups.client(url)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="connections", daemon=True)
        self.most = 0
        """Since `restart`."""
        self.most_ever = 0

    def __enter__(self) -> Connections:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._server.close()

    def restart(self) -> None:
        """Observe from now on."""
        self.most = 0

    def _main(self) -> None:
        while not self._closing.wait(LOOK_S):
            now = int(self._server.info("clients")["connected_clients"])
            self.most, self.most_ever = max(self.most, now), max(self.most_ever, now)


@dataclass
class ScaledRun:
    """A run of a stub stack. `server`: a direct connection."""

    stack: StubStack
    run: str
    server: Any

    def kept(self, role: str) -> Kept:
        """The process that plays a role."""
        return self.stack.processes(self.run)["gateway" if role == "controller" else f"{role}-0"]

    def ready(self, role: str, pid: int) -> bool:
        """Whether process `pid` announces the role, and that it is ready."""
        found = lookups.processes(self.server, self.run, role)
        return any(process.pid == pid and process.state == lookups.READY for process in found)

    def announced(self) -> int:
        """How many processes announce themselves."""
        return len(lookups.processes(self.server, self.run))

    def pending(self) -> int:
        """How many groups are pending."""
        return int(self.server.scard(lookups.key(self.run, "pending")))

    def counter(self, name: str) -> int:
        """A counter of the training lane."""
        return int(self.server.hget(lookups.key(self.run, "counters"), name) or 0)

    def added(self, stream: str) -> int:
        """How many entries a stream has ever had."""
        name = lookups.key(self.run, stream)
        return int(self.server.xinfo_stream(name)["entries-added"]) if self.server.exists(name) else 0

    def step(self) -> int:
        """The committed rollout step."""
        policy = lookups.policy(self.server, self.run)
        return policy[1] if policy else 0


WORK: Mapping[str, Callable[[ScaledRun], int]] = {
    "verifier": lambda run: run.added("verdicts"),
    "rollout": lambda run: run.added("samples"),
    "learner": lambda run: run.step(),
    "controller": lambda run: run.counter("judged"),
    "sampler": lambda run: run.counter("judged"),
}
"""By role, in the order in which they are killed: a number that grows with the role's work."""


def seconds_until(fact: Callable[[], bool], since: float, deadline_s: float) -> float | None:
    """Seconds from `since` (Unix) until the fact holds; None if that took longer than `deadline_s`."""
    while (passed := time.time() - since) <= deadline_s:
        if fact():
            return passed
        time.sleep(LOOK_S)
    return None
