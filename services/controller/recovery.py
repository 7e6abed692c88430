"""Owns what is done about a run's processes that died or fell silent, and when that is given up.

Must not start or end processes itself; it asks the cluster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from services.controller.cluster import Cluster
from services.streams.connection import Redis
from services.streams.journal import Journal
from services.streams.presence import LAPSES_S, live_processes
from services.streams.records import RunRecord
from services.waits import Waits

log = logging.getLogger(__name__)

SILENT_S = 20.0
"""How long a presence may have lapsed although the process lives: together with the lapse, half a minute of silence."""
LOOK_S = 6.0
"""The most that one look adds to a silence: while Redis or this process was away, nobody could be heard."""
LEARNER_RESTARTS = 10
"""Starts of the learner in a row without a new rollout step. A kill of one that had become ready is forgiven."""


FAILED = "failed: "
"""In a fault that a service reported itself, as against one whose process was killed or fell silent."""


class RunFailedError(RuntimeError):
    """The run cannot go on; the text is the reason people see."""


class Silence:
    """Whether the processes of one service have fallen silent: `wanted` of them were there, and no longer are."""

    def __init__(self, service: str, wanted: int) -> None:
        self._service = service
        self._wanted = wanted
        self._former: frozenset[str] = frozenset()
        self._seen = False
        self._silent_s = 0.0
        self._looked_at = time.monotonic()

    def observe(self, present: Collection[str], startup_s: float) -> str | None:
        """One line once they are overdue. `present`: the ids under which the service's processes announce themselves.

        Processes that have not been seen yet are given `startup_s` seconds.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, LOOK_S)
        self._looked_at = now
        here = len(set(present) - self._former)
        if here >= self._wanted:
            self._seen, self._silent_s = True, 0.0
        if self._silent_s <= (SILENT_S if self._seen else startup_s):
            return None
        silent_s = self._silent_s + (LAPSES_S if self._seen else 0.0)
        return f"{self._service}: {self._wanted - here} of {self._wanted} processes silent for {silent_s:.0f} s"

    def begin_anew(self, present: Collection[str]) -> None:
        """Expect other processes: those whose presence is still there are the former ones."""
        self._former, self._seen = frozenset(present), False
        self._silent_s, self._looked_at = 0.0, time.monotonic()


class Recovery:
    """Watches over one run's processes. The bounds count restarts in a row that led nowhere, never restarts as such."""

    def __init__(self, redis: Redis, cluster: Cluster, journal: Journal, waits: Waits, record: RunRecord) -> None:
        self._redis = redis
        self._cluster = cluster
        self._journal = journal
        self._waits = waits
        self._run = record.id
        self._sampler = Silence("sampler", 1)
        self._learner = Silence("learner", record.recipe.learner.ranks)
        self._learner_starts = 0
        self._former_learners: set[str] = set()
        self._learner_was_ready = False
        self._step = -1

    async def look(self, record: RunRecord) -> None:
        """Start anew what needs it. Raises RunFailedError when starting anew does not help."""
        processes = await live_processes(self._redis, self._run)
        present = {
            service: [one.id for one in processes if one.service == service] for service in ("sampler", "learner")
        }
        ready = {one.pid for one in processes if one.state == "ready"}
        if faults := await self._cluster.faults(self._run, ready):
            raise RunFailedError("; ".join([*faults, *await self._last_words()]))
        startup_s = record.recipe.limits.startup_timeout_s
        if silence := self._sampler.observe(present["sampler"], startup_s):
            await self._journal.event("sampler-restarted", silence)
            await self._cluster.restart_sampler(self._run)
            self._sampler.begin_anew(present["sampler"])
        learners = {one.id for one in processes if one.service == "learner" and one.state == "ready"}
        self._learner_was_ready |= bool(learners - self._former_learners)
        if record.recipe.limits.rollout_steps:
            silence = self._learner.observe(present["learner"], startup_s)
            if fault := await self._cluster.learner_fault(self._run) or silence:
                await self._restart_learner(record, fault)
                self._former_learners = learners
                self._learner.begin_anew(present["learner"])

    async def _restart_learner(self, record: RunRecord, fault: str) -> None:
        step = await self._journal.step()
        # A learner that was well until it was killed is no sign of a fault, however often; one that failed is.
        forgiven = step != self._step or (self._learner_was_ready and FAILED not in fault)
        self._learner_starts = 1 if forgiven else self._learner_starts + 1
        self._step, self._learner_was_ready = step, False
        if self._learner_starts > LEARNER_RESTARTS:
            raise RunFailedError(
                f"{fault} (the learner was started anew {LEARNER_RESTARTS} times without a new rollout step)"
            )
        text = f"{fault}; all ranks begin anew ({self._learner_starts} of {LEARNER_RESTARTS} at rollout step {step})"
        await self._journal.event("learner-restarted", text)
        with self._waits.on("placing", "the learner's ranks to begin anew", record.recipe.limits.startup_timeout_s):
            await self._cluster.restart_learner(record)

    async def _last_words(self) -> list[str]:
        """What the service that failed last said of it, if any did."""
        return [event.text for _, event in await self._journal.events() if event.phase == "service-failed"][-1:]
