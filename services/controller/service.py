"""Owns the controller's loop: a keeper for every run that has not ended.

Must not look inside a run; its keeper does.

Reads run records; writes states, events, summaries. When it dies, its successor takes up every unfinished run.
Drain order: keepers see `stopping` and stop their run's services, then the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

from services.cancellation import end
from services.contracts import RunState
from services.controller.cluster import Cluster
from services.controller.keeper import PERIOD_S, STOP_DEADLINE_S, RunKeeper
from services.metrics import RUNS
from services.streams.connection import Redis
from services.streams.records import RunRecords

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
            await end(*self._keepers.values())

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
        states = Counter(record.state for record in records)
        for state in RunState:
            RUNS.labels(state.value).set(states[state])
        for run, task in list(self._keepers.items()):
            if task.done():
                del self._keepers[run]
                if not task.cancelled() and (error := task.exception()):
                    log.error("the keeper of run %s broke: %s; taking the run up again", run, error)
        for record in records:
            if not record.state.ended and record.id not in self._keepers:
                keeper = RunKeeper(self._redis, self._records, self._cluster, self._runs, record.id, stopping)
                self._keepers[record.id] = asyncio.create_task(keeper.keep(), name=f"keeper of {record.id}")
