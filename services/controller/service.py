"""Owns the controller's loop: a keeper for every run that has not ended.

Must not look inside a run; its keeper does.

Reads run records; writes states, events, summaries. When it dies, its successor takes up every unfinished run.
Drain order: keepers see `stopping` and stop their run's services, then the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.cancellation import cancel_and_wait
from services.controller.cluster import Cluster
from services.controller.run import PERIOD_S, STOP_DEADLINE_S, RunKeeper
from services.controller.run_metrics import show_runs
from services.streams.connection.client import Redis
from services.streams.connection.functions import FencedError
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import OWNER, RunRecords

FAILING_S = 300.0
"""How long the run records may be out of reach: each look waits a while for a Redis that is away."""
KEEPERS_DEADLINE_S = STOP_DEADLINE_S + 3.0

log = logging.getLogger(__name__)


class Controller:
    """Turns run records into running services. `runs` is the folder that gets one subfolder a run."""

    def __init__(self, redis: Redis, cluster: Cluster, runs: Path) -> None:
        self._redis = redis
        self._records = RunRecords(redis)
        self._cluster = cluster
        self._runs = runs
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep runs until `stopping` is set; a keeper that breaks is logged and taken up again."""
        read_at = time.monotonic()
        try:
            while not stopping.is_set():
                read_at = await self._try_to_take_up(stopping, read_at)
                await asyncio.sleep(PERIOD_S)
        finally:
            stopping.set()
            if self._keepers:
                await asyncio.wait(self._keepers.values(), timeout=KEEPERS_DEADLINE_S)
            await cancel_and_wait(*self._keepers.values())

    async def _try_to_take_up(self, stopping: asyncio.Event, read_at: float) -> float:
        """A look that fails leaves the keepers alone; when one last succeeded. Raises what fails for FAILING_S."""
        try:
            await self._take_up(stopping)
        except Exception:
            failing_s = time.monotonic() - read_at
            if failing_s >= FAILING_S:
                raise
            log.exception("run records cannot be read for %.0f s; the runs go on", failing_s)
            return read_at
        return time.monotonic()

    async def _take_up(self, stopping: asyncio.Event) -> None:
        records = await self._records.all()
        show_runs(records, time.time())
        self._hear_keepers()
        for record in records:
            if not record.state.ended and record.id not in self._keepers and not await self._kept_elsewhere(record.id):
                keeper = RunKeeper(self._redis, self._records, self._cluster, self._runs, record.id, stopping)
                self._keepers[record.id] = asyncio.create_task(keeper.keep(), name=f"keeper of {record.id}")

    def _hear_keepers(self) -> None:
        for run, task in list(self._keepers.items()):
            if task.done():
                del self._keepers[run]
                error = None if task.cancelled() else task.exception()
                if isinstance(error, FencedError):
                    log.warning("run %s is left to another controller: %s", run, error)
                    self._left.add(run)
                elif error:
                    log.error("the keeper of run %s broke: %s; taking the run up again", run, error)

    async def _kept_elsewhere(self, run: str) -> bool:
        """Whether another controller took the run from this one and lives: taking it back would go on for ever."""
        if run not in self._left:
            return False
        if any(one.service == OWNER for one in await live_processes(self._redis, run)):
            return True
        self._left.discard(run)
        log.warning("run %s: the other controller has fallen silent; taking the run up again", run)
        return False
