"""Owns the health of a run's processes: which have died or fallen silent, and what is restarted because of it.

Must not start or stop processes itself; it asks the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from services.contracts import ProcessInfo
from services.controller.cluster import Cluster
from services.controller.fleet.avoiding import Avoiding
from services.controller.retry import RetriedRequest, RunFailedError
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.places import AvoidedPlace
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import LAPSES_S
from services.streams.state.policy_history import committed_step
from services.streams.state.run_record import RunRecord
from services.waits import Waits

SILENT_S = 20.0
"""How long after its heartbeat has lapsed a process counts as silent: half a minute together with the lapse."""
CHECK_S = 6.0
"""The most that one check adds to a silence: without Redis, or while this process hangs, no heartbeat can be read."""
LEARNER_RESTARTS = 10
"""Restarts of the learner in a row without a new rollout step. The kill of a learner that was ready does not count."""
FAILED = "failed: "
"""Part of the text of a fault that a service reported itself, and of no fault of a killed or silent process."""


class Silence:
    """Whether the processes of one service have fallen silent: `wanted` of them were present, and no longer are."""

    def __init__(self, service: str, wanted: int) -> None:
        self._service = service
        self._wanted = wanted
        self._previous: frozenset[str] = frozenset()
        self._seen = False
        self._silent_s = 0.0
        self._checked_at = time.monotonic()

    def observe(self, present: Collection[str], startup_s: float) -> str | None:
        """One line once processes are overdue. `present`: the ids of the service's processes that have a heartbeat.

        Processes that have not been seen yet have `startup_s` seconds to appear.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._checked_at, CHECK_S)
        self._checked_at = now
        here = len(set(present) - self._previous)
        if here >= self._wanted:
            self._seen, self._silent_s = True, 0.0
        if self._silent_s <= (SILENT_S if self._seen else startup_s):
            return None
        silent_s = self._silent_s + (LAPSES_S if self._seen else 0.0)
        return f"{self._service}: {self._wanted - here} of {self._wanted} processes silent for {silent_s:.0f} s"

    def restart(self, present: Collection[str]) -> None:
        """Expect new processes: those that still have a heartbeat are the previous ones."""
        self._previous, self._seen = frozenset(present), False
        self._silent_s, self._checked_at = 0.0, time.monotonic()


class HealthMonitor:
    """Checks one run's processes, and restarts the sampler and the learner.

    The limits count restarts in a row that did not help, not all restarts. A request that the cluster could not
    fulfil is retried, whatever the processes do in the meantime.
    """

    def __init__(self, redis: Redis, cluster: Cluster, event_log: EventLog, waits: Waits, record: RunRecord) -> None:
        self._redis = redis
        self._cluster = cluster
        self._event_log = event_log
        self._waits = waits
        self._run = record.id
        self._sampler = Silence("sampler", 1)
        self._learner = Silence("learner", record.recipe.learner.ranks)
        self._checks = self._request("look-failed", "the run's processes could not be checked", "look")
        self._sampler_restart = self._request("restart-failed", "the sampler could not be restarted", "sampler-restart")
        self._learner_restart = self._request("restart-failed", "the learner could not be restarted", "learner-restart")
        self._learner_restarts = 0
        self._previous_learners: set[str] = set()
        self._avoiding = Avoiding(redis, cluster, event_log, record.id)
        self._learner_was_ready = False
        self._step = -1

    def _request(self, phase: str, failure: str, wait: str) -> RetriedRequest:
        return RetriedRequest(self._event_log, self._waits, phase=phase, failure=failure, wait=wait)

    async def check(self, record: RunRecord, processes: list[ProcessInfo]) -> bool:
        """Restart the services that need it. `processes`: the run's live ones.

        Returns whether a restart was pending before or is now, because the run cannot progress meanwhile; also when a
        place is avoided that was not before, because processes then start elsewhere. Raises RunFailedError when
        restarts do not help, or cannot be done.
        """
        pending = self._restart_pending
        trains = record.recipe.limits.rollout_steps > 0
        ready, joining = (
            {process.host_pid for process in processes if process.state == state} for state in ("ready", "joining")
        )
        faults: list[str] = []
        fault: str | None = None
        moves, behind = False, list[AvoidedPlace]()
        if self._checks.due:
            async with self._checks:
                moves = await self._avoiding.look()
                faults = await self._cluster.faults(self._run, ready, joining)
                fault = await self._cluster.learner_fault(self._run) if trains else None
                if fault and not self._learner_restart.retry_pending:
                    behind = await self._cluster.blamed(record)
        if faults:
            raise RunFailedError("; ".join([*faults, *await self._last_failure()]))
        await self._check_sampler(record, processes)
        if trains:
            await self._check_learner(record, processes, fault, behind)
        return pending or self._restart_pending or moves

    async def background(self) -> str:
        """What may explain why processes are missing, to be added to a reason: avoided places, and the last failure."""
        failures = [f"the last failure: {text}" for text in await self._last_failure()]
        return "".join(f"; {text}" for text in [*map(str, self._avoiding.places), *failures])

    def close(self) -> None:
        """Show nothing of the run any more."""
        self._avoiding.close()

    @property
    def _restart_pending(self) -> bool:
        return self._sampler_restart.retry_pending or self._learner_restart.retry_pending

    async def _check_sampler(self, record: RunRecord, processes: list[ProcessInfo]) -> None:
        present = [process.id for process in processes if process.service == "sampler"]
        silence = self._sampler.observe(present, record.recipe.limits.startup_timeout_s)
        if silence is None:
            self._sampler_restart.reset()  # its heartbeat may have returned before it could be killed
        elif self._sampler_restart.due:
            if not self._sampler_restart.retry_pending:
                await self._event_log.write("sampler-restarted", silence)
            async with self._sampler_restart:
                await self._cluster.restart_sampler(self._run)
                self._sampler.restart(present)

    async def _check_learner(
        self, record: RunRecord, processes: list[ProcessInfo], fault: str | None, behind: Collection[AvoidedPlace]
    ) -> None:
        learners = [process for process in processes if process.service == "learner"]
        present = [process.id for process in learners]
        ready = {process.id for process in learners if process.state == "ready"}
        startup_s = record.recipe.limits.startup_timeout_s
        silence = self._learner.observe(present, startup_s)
        if self._learner_restart.retry_pending:
            if not self._learner_restart.due:
                return
        else:
            self._learner_was_ready |= bool(ready - self._previous_learners)
            if not (cause := fault or silence):
                return
            await self._count_learner_restart(cause, behind)
        # Killed ranks, and ranks that a failed restart had started, have a heartbeat until it lapses.
        self._previous_learners = ready
        async with self._learner_restart:
            with self._waits.on("placing", "the learner's ranks to be restarted", startup_s):
                await self._cluster.restart_learner(record)
            self._learner.restart(present)

    async def _count_learner_restart(self, fault: str, behind: Collection[AvoidedPlace]) -> None:
        """Report that the learner is restarted, and why; once for all attempts. `behind`: the nodes behind the fault.

        Raises RunFailedError at the limit.
        """
        step = await committed_step(self._redis, RunKeys(self._run))
        # However often a ready learner is killed, that is no sign of a fault; a failure that it reports is one.
        forgiven = step != self._step or (self._learner_was_ready and FAILED not in fault)
        self._learner_restarts = 1 if forgiven else self._learner_restarts + 1
        self._step, self._learner_was_ready = step, False
        await self._avoiding.blame(behind, forgiven=forgiven)
        if self._learner_restarts > LEARNER_RESTARTS:
            raise RunFailedError(
                f"{fault} (the learner was restarted {LEARNER_RESTARTS} times without a new rollout step)"
            )
        count = f"{self._learner_restarts} of {LEARNER_RESTARTS} at rollout step {step}"
        await self._event_log.write("learner-restarted", f"{fault}; all ranks are restarted ({count})")

    async def _last_failure(self) -> list[str]:
        """The text of the last event in which a service reported its failure, if there is one."""
        async for event in self._event_log.newest_events():
            if event.phase == "service-failed":
                return [event.text]
        return []


def learner_recovery(processes: list[ProcessInfo]) -> set[str]:
    """The progress texts of a restarted learner that trains archived steps again; each text counts once."""
    learners = [process for process in processes if process.service == "learner"]
    return {wait.waits_for for process in learners for wait in process.waits if wait.name == "recovery"}
