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
from tests.chaos.cuts import Cut
from tests.chaos.ground import Ground
from tests.chaos.lookups import Held, Process, Sync
from tests.harness.stack import ENDED, Stack
from tests.harness.stubs.stack import StubStack

ENDINGS = ("trained", "filtered", "stale", "dead", "judged", "evaluated")


@dataclass
class Scene:
    """One run under faults. `server`: the suite's own connection to Redis.

    `cuts`: the failovers that lost writes. `resuming` is held while a fault has cancelled the run and will resume it,
    `outage` while the store is away.
    """

    run: str
    server: Any
    stack: Stack | StubStack
    folder: Path
    recipe: dict[str, Any]
    rng: random.Random
    ground: Ground = field(default_factory=Ground)
    injected: list[tuple[str, str]] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    resuming: threading.Lock = field(default_factory=threading.Lock)
    outage: threading.Lock = field(default_factory=threading.Lock)
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
        """Whether the run has succeeded, failed or was cancelled for good, or the episode was abandoned."""
        if self.abandoned.is_set():
            return True
        # Asked first: a fault lets go once the run is no longer cancelled.
        resuming = self.resuming.locked()
        state = lookups.state(self.server, self.run)
        return state in ENDED and not (resuming and state == "cancelled")

    @property
    def files(self) -> Path:
        """Where the run's durable files are."""
        return self.ground.files(self.run, self.folder)

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
    `patience_s`: how long the stopped victim may take to get a lease.
    """

    process: str | None = None
    pid: int | None = None
    leases: tuple[Held, ...] = ()
    batch: int | None = None
    sync: Sync | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    patience_s: float = 0.0

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
