"""Owns what is done about a run's processes that died or fell silent, and when that is given up.

Must not start or end processes itself; it asks the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from services.contracts import ProcessInfo
from services.controller.cluster import Cluster
from services.controller.retry import Attempts, RunFailedError
from services.streams.connection.client import Redis
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import LAPSES_S, live_processes
from services.streams.state.runs import RunRecord
from services.waits import Waits

SILENT_S = 20.0
"""How long after its heartbeat has lapsed a process counts as silent: half a minute together with the lapse."""
LOOK_S = 6.0
"""The most that one look adds to a silence: while Redis or this process was away, nobody could be heard."""
LEARNER_RESTARTS = 10
"""Starts of the learner in a row without a new rollout step. A kill of one that had become ready is forgiven."""
FAILED = "failed: "
"""In a fault that a service reported itself, as against one whose process was killed or fell silent."""


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
        """Expect other processes: those whose heartbeat is still there are the former ones."""
        self._former, self._seen = frozenset(present), False
        self._silent_s, self._looked_at = 0.0, time.monotonic()


class Recovery:
    """Watches over one run's processes. The bounds count restarts in a row that led nowhere, never restarts as such.

    What the cluster could not do is owed: it is asked again, whatever is heard of the processes meanwhile.
    """

    def __init__(self, redis: Redis, cluster: Cluster, event_log: EventLog, waits: Waits, record: RunRecord) -> None:
        self._redis = redis
        self._cluster = cluster
        self._event_log = event_log
        self._waits = waits
        self._run = record.id
        self._sampler = Silence("sampler", 1)
        self._learner = Silence("learner", record.recipe.learner.ranks)
        self._looks = Attempts(event_log, waits, "look-failed", "the run's processes could not be looked at", "look")
        self._sampler_starts = Attempts(
            event_log, waits, "restart-failed", "the sampler could not be started anew", "sampler-restart"
        )
        self._learner_starts = Attempts(
            event_log, waits, "restart-failed", "the learner could not be started anew", "learner-restart"
        )
        self._learner_restarts = 0
        self._former_learners: set[str] = set()
        self._learner_was_ready = False
        self._step = -1

    async def look(self, record: RunRecord) -> bool:
        """Start anew what needs it; whether a restart was owed before or is now: the run cannot get on in that time.

        Raises RunFailedError when starting anew does not help, or cannot be done.
        """
        owed = self._owed
        processes = await live_processes(self._redis, self._run)
        trains = record.recipe.limits.rollout_steps > 0
        ready = {one.host_pid for one in processes if one.state == "ready"}
        faults: list[str] = []
        fault: str | None = None
        if self._looks.due:
            async with self._looks:
                faults = await self._cluster.faults(self._run, ready)
                fault = await self._cluster.learner_fault(self._run) if trains else None
        if faults:
            raise RunFailedError("; ".join([*faults, *await self._last_words()]))
        await self._look_at_sampler(record, processes)
        if trains:
            await self._look_at_learner(record, processes, fault)
        return owed or self._owed

    @property
    def _owed(self) -> bool:
        return self._sampler_starts.owed or self._learner_starts.owed

    async def _look_at_sampler(self, record: RunRecord, processes: list[ProcessInfo]) -> None:
        present = [one.id for one in processes if one.service == "sampler"]
        silence = self._sampler.observe(present, record.recipe.limits.startup_timeout_s)
        if silence is None:
            self._sampler_starts.settle()  # it may have been heard again before it could be killed
        elif self._sampler_starts.due:
            if not self._sampler_starts.owed:
                await self._event_log.write("sampler-restarted", silence)
            async with self._sampler_starts:
                await self._cluster.restart_sampler(self._run)
                self._sampler.begin_anew(present)

    async def _look_at_learner(self, record: RunRecord, processes: list[ProcessInfo], fault: str | None) -> None:
        learners = [one for one in processes if one.service == "learner"]
        present, ready = [one.id for one in learners], {one.id for one in learners if one.state == "ready"}
        startup_s = record.recipe.limits.startup_timeout_s
        silence = self._learner.observe(present, startup_s)
        if self._learner_starts.owed:
            if not self._learner_starts.due:
                return
        else:
            self._learner_was_ready |= bool(ready - self._former_learners)
            if not (cause := fault or silence):
                return
            await self._note_learner_restart(cause)
        # The heartbeat of one that is killed lasts a while; so does that of ranks that only half of a start had begun.
        self._former_learners = ready
        async with self._learner_starts:
            with self._waits.on("placing", "the learner's ranks to begin anew", startup_s):
                await self._cluster.restart_learner(record)
            self._learner.begin_anew(present)

    async def _note_learner_restart(self, fault: str) -> None:
        """Tell that the learner begins anew, and why; once, however many attempts that takes. Raises RunFailedError."""
        step = await self._event_log.step()
        # A learner that was well until it was killed is no sign of a fault, however often; one that failed is.
        forgiven = step != self._step or (self._learner_was_ready and FAILED not in fault)
        self._learner_restarts = 1 if forgiven else self._learner_restarts + 1
        self._step, self._learner_was_ready = step, False
        if self._learner_restarts > LEARNER_RESTARTS:
            raise RunFailedError(
                f"{fault} (the learner was started anew {LEARNER_RESTARTS} times without a new rollout step)"
            )
        text = f"{fault}; all ranks begin anew ({self._learner_restarts} of {LEARNER_RESTARTS} at rollout step {step})"
        await self._event_log.write("learner-restarted", text)

    async def _last_words(self) -> list[str]:
        """What the service that failed last said of it, if any did."""
        return [event.text for _, event in await self._event_log.events() if event.phase == "service-failed"][-1:]
