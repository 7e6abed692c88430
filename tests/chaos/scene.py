"""Owns the environment of a fault: the run, its Redis, the stack, the disk, a seeded random generator.

Must not import the code under test.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import lookups
from tests.chaos.ground import ProxyThread
from tests.chaos.lookups import Held, Process, Sync
from tests.harness.stack import ENDED, Stack
from tests.harness.stubs.stack import StubStack

ENDINGS = ("trained", "filtered", "stale", "dead", "judged", "evaluated")


@dataclass
class Scene:
    """One run under faults. `server`: a direct connection to Redis; `proxy`: the proxy in front of it, if any."""

    run: str
    server: Any
    stack: Stack | StubStack
    folder: Path
    recipe: dict[str, Any]
    rng: random.Random
    proxy: ProxyThread | None = None
    injected: list[tuple[str, str]] = field(default_factory=list)
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def lease_s(self) -> float:
        """How long a lease lasts without renewal."""
        return float(self.recipe["limits"]["lease_s"])

    def wanted(self, service: str) -> int:
        """How many processes of a service the run should have."""
        per_service = {
            "rollout": self.recipe["rollout"]["replicas"],
            "verifier": self.recipe["verifier"]["replicas"],
            "learner": self.recipe["learner"]["ranks"],
        }
        return int(per_service.get(service, 1))

    def ready(self, service: str) -> list[Process]:
        """The service's processes in state ready."""
        return [
            process for process in lookups.processes(self.server, self.run, service) if process.state == lookups.READY
        ]

    def ended(self) -> bool:
        """Whether the run has succeeded, failed or was cancelled, or the episode was abandoned."""
        return self.abandoned.is_set() or lookups.state(self.server, self.run) in ENDED

    def succeeded(self) -> bool:
        """Whether the run has succeeded."""
        return lookups.state(self.server, self.run) == "succeeded"

    def step(self) -> int:
        """The committed rollout step; 0 before the first."""
        policy = lookups.policy(self.server, self.run)
        return policy[1] if policy else 0

    def endings(self) -> int:
        """A number that grows with everything that finishes: groups, evaluation prompts, steps."""
        total = self.step()
        for prefix in lookups.LANES.values():
            counters = lookups.texts(self.server.hgetall(lookups.key(self.run, f"{prefix}counters")))
            total += sum(int(counters.get(name, 0)) for name in ENDINGS)
        return total


@dataclass(frozen=True)
class Moment:
    """What a victim holds: leases, an uncommitted batch (its step), or a sync that it has not acked.

    `process` and `pid` are None for victims that are not processes. `facts`: other inputs of the strike.
    """

    process: str | None = None
    pid: int | None = None
    leases: tuple[Held, ...] = ()
    batch: int | None = None
    sync: Sync | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Evidence for the record."""
        return {
            "process": self.process,
            "pid": self.pid,
            "leases": [[lease.stream, lease.entry, lease.consumer] for lease in self.leases[:20]],
            "batch": self.batch,
            "sync": [self.sync.generation, self.sync.version, sorted(self.sync.missing)] if self.sync else None,
            **{name: value for name, value in self.facts.items() if isinstance(value, str | int | float)},
        }
