"""Owns the controller's loop: one RunController for every run that has not ended, and the closing of ended ones.

Must not look inside a run; its RunController does.

Reads run records; writes states, events, summaries. After its death, the next controller resumes every unfinished run.
Drain order: the RunControllers see `stopping` and stop their run's services, then the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.cancellation import cancel_and_wait
from services.contracts import RunState
from services.controller.cluster import Cluster
from services.controller.ended.closings import Closings
from services.controller.ended.expiry import Expiry
from services.controller.ended.known_runs import KnownRuns
from services.controller.ended.libraries import Libraries
from services.controller.run import RunController
from services.controller.run_context import PERIOD_S, STOP_DEADLINE_S, RunContext
from services.controller.run_metrics import RunStates
from services.settings import load_expiry
from services.streams.connection.client import Redis
from services.streams.connection.functions import FencedError
from services.streams.state.heartbeat import live_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords

FAILING_S = 300.0
"""How long the run records may be unreadable: each attempt waits for an unavailable Redis."""
RUNS_DEADLINE_S = STOP_DEADLINE_S + 3.0

log = logging.getLogger(__name__)


class Controller:
    """Turns run records into running services. `runs` is the folder that gets one subfolder per run.

    Raises ExpiryError for an operator's setting that cannot be used.
    """

    def __init__(self, redis: Redis, cluster: Cluster, runs: Path) -> None:
        self._redis = redis
        self._records = RunRecords(redis)
        self._known = KnownRuns(redis, self._records)
        self._states = RunStates()
        self._closings = Closings(redis, runs)
        self._libraries = Libraries(redis)
        self._expiry = Expiry(redis, load_expiry())
        self._cluster = cluster
        self._runs = runs
        self._controlled: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._unreadable: set[str] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Control all runs until `stopping` is set; a RunController that fails is logged and started again."""
        read_at = time.monotonic()
        try:
            while not stopping.is_set():
                read_at = await self._try_to_start_runs(stopping, read_at)
                await asyncio.sleep(PERIOD_S)
        finally:
            stopping.set()
            if self._controlled:
                await asyncio.wait(self._controlled.values(), timeout=RUNS_DEADLINE_S)
            await cancel_and_wait(*self._controlled.values())

    async def _try_to_start_runs(self, stopping: asyncio.Event, read_at: float) -> float:
        """When the records were last read. A failure does not affect the runs; one that lasts FAILING_S is raised."""
        try:
            await self._start_runs(stopping)
        except Exception:
            failing_s = time.monotonic() - read_at
            if failing_s >= FAILING_S:
                raise
            log.exception("run records have been unreadable for %.0f s; the runs continue", failing_s)
            return read_at
        return time.monotonic()

    async def _start_runs(self, stopping: asyncio.Event) -> None:
        records = await self._known.look()
        self._states.show(records, self._known.ended, time.time())
        await self._expiry.look(self._known.ended, time.time())
        await self._libraries.look([record.id for record in records])
        self._collect_ended()
        for record in records:
            if record.id in self._controlled or self._waits(record) or await self._owned_elsewhere(record.id):
                continue
            working = self._closings.close(record.id, stopping) if record.closing else self._control(record, stopping)
            self._controlled[record.id] = asyncio.create_task(working, name=f"controller of {record.id}")

    def _waits(self, record: RunRecord) -> bool:
        """Whether the run waits to be cancelled, or for a release that can read it."""
        if record.closing or record.cancel_requested or not record.problem:
            return False
        if record.id not in self._unreadable:
            self._unreadable.add(record.id)
            log.warning("left alone: %s", record.problem)
        return True

    async def _control(self, record: RunRecord, stopping: asyncio.Event) -> None:
        if record.problem:
            await self._cluster.stop(record.id, STOP_DEADLINE_S)
            await self._records.transition(record.id, RunState.CANCELLED, f"cancelled on request; {record.problem}")
            return
        folder = self._runs / record.id
        context = RunContext(self._redis, self._records, self._cluster, folder, record.id, stopping)
        await RunController(context).run()

    def _collect_ended(self) -> None:
        for run, task in list(self._controlled.items()):
            if task.done():
                del self._controlled[run]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, FencedError):
                    log.warning("run %s has another owner: %s", run, error)
                elif error:
                    log.error("the controller of run %s failed: %s; resuming the run", run, error)

    async def _owned_elsewhere(self, run: str) -> bool:
        """Whether another live controller owns the run: of another platform on this Redis, or one that was replaced.

        A controller that was killed owns its runs until its heartbeat lapses.
        """
        owners = [process for process in await live_processes(self._redis, run) if process.service == OWNER]
        if not owners:
            self._left.discard(run)
            return False
        if run not in self._left:
            self._left.add(run)
            log.warning(
                "run %s is left to the controller %s on host %s, which has a heartbeat",
                run,
                owners[0].id,
                owners[0].host,
            )
        return True
