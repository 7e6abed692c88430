"""Owns the controller's loop: one RunController for every run that has not ended, and the closing of ended ones.

Must not look inside a run; its RunController does.

Reads run records; writes states, events, summaries. After its death, the next controller resumes every unfinished run.
Drain order: the RunControllers see `stopping` and stop their run's services, then the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from services.contracts import RunState
from services.controller.cluster import Cluster
from services.controller.ended.closings import Closings
from services.controller.ended.expiry import Expiry
from services.controller.ended.known_runs import KnownRuns
from services.controller.ended.libraries import Libraries
from services.controller.run import RunController
from services.controller.run_context import PERIOD_S, STOP_DEADLINE_S, RunContext
from services.controller.run_metrics import RunStates
from services.settings import load_expiry, load_prices
from services.streams.connection.client import Redis
from services.streams.connection.functions import FencedError
from services.streams.state.heartbeat import surviving_processes
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords, UnknownRunError
from services.waits import cancel_and_wait

FAILING_S = 300.0
"""How long the run records may be unreadable: each attempt waits for an unavailable Redis."""
RUNS_DEADLINE_S = STOP_DEADLINE_S + 3.0

log = logging.getLogger(__name__)


class Controller:
    """Turns run records into running services. `runs` is the folder that gets one subfolder per run.

    Raises ExpiryError, PricesError for an operator's setting that cannot be used.
    """

    def __init__(self, redis: Redis, cluster: Cluster, runs: Path) -> None:
        self._redis = redis
        self._records = RunRecords(redis)
        self._known = KnownRuns(redis, self._records)
        self._states = RunStates()
        self._closings = Closings(redis, runs)
        self._libraries = Libraries(redis)
        self._expiry = Expiry(redis, runs, load_expiry())
        self._prices = load_prices()
        self._cluster = cluster
        self._runs = runs
        self._controlled: dict[str, asyncio.Task[None]] = {}
        self._owned: dict[str, RunRecord] = {}  # as read last: what is left of a run that Redis loses
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
        self._states.show(records, self._known.ended)
        await self._expiry.look(time.time())
        await self._libraries.look([record.id for record in records])
        self._collect_ended()
        active = {record.id: record for record in records}
        self._owned.update({run: active[run] for run in self._owned.keys() & active.keys()})
        for run in self._owned.keys() - active.keys() - self._controlled.keys():
            if await self._records.exists(run):
                del self._owned[run]  # it has ended
            else:
                self._begin(run, self._end_lost(self._owned[run], stopping))
        for record in records:
            if record.id not in self._controlled and not self._waits(record):
                self._begin(record.id, self._work(record, stopping))

    def _waits(self, record: RunRecord) -> bool:
        """Whether the run waits to be cancelled, or for a release that can read it."""
        if record.closing or record.cancel_requested or not record.problem:
            return False
        if record.id not in self._unreadable:
            self._unreadable.add(record.id)
            log.warning("left alone: %s", record.problem)
        return True

    def _begin(self, run: str, work: Coroutine[Any, Any, None]) -> None:
        self._controlled[run] = asyncio.create_task(work, name=f"controller of {run}")

    async def _work(self, record: RunRecord, stopping: asyncio.Event) -> None:
        run = record.id
        self._owned.pop(run, None)
        if await self._owned_elsewhere(run) or stopping.is_set():
            return
        if record.closing:
            await self._closings.close(run, stopping)
            return
        if record.problem:
            await self._cluster.stop(run, STOP_DEADLINE_S)
            await self._records.transition(run, RunState.CANCELLED, f"cancelled on request; {record.problem}")
            return
        self._owned[run] = record
        await self._controller(run, stopping).run()
        del self._owned[run]

    async def _end_lost(self, record: RunRecord, stopping: asyncio.Event) -> None:
        await self._controller(record.id, stopping).end_lost(record)
        del self._owned[record.id]

    def _controller(self, run: str, stopping: asyncio.Event) -> RunController:
        context = RunContext(
            self._redis, self._records, self._cluster, self._runs / run, run, stopping, prices=self._prices
        )
        return RunController(context)

    def _collect_ended(self) -> None:
        for run, task in list(self._controlled.items()):
            if task.done():
                del self._controlled[run]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, (FencedError, UnknownRunError)):
                    log.info("the controller of run %s ended: %s", run, error)  # the next look reports what follows
                elif error:
                    log.error("the controller of run %s failed: %s", run, error)

    async def _owned_elsewhere(self, run: str) -> bool:
        """Whether another live controller owns the run: of another platform on this Redis, or one that was replaced.

        A controller that was killed owns its runs until its heartbeat lapses.
        """
        owners = await surviving_processes(self._redis, run, OWNER)
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
