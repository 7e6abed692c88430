"""Owns when a run that failed or was cancelled expires.

Must not delete anything: `closings` carries out what is closed here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.contracts import Closing
from services.controller.ended.known_runs import EndedRuns
from services.storage.errors import StoreError
from services.storage.mirror import places_here
from services.streams.connection.client import Redis
from services.streams.state.ended.closing import close_run
from services.streams.state.run_record import UnreadableRunError
from services.streams.state.runs import RESUMABLE, RunStateError

log = logging.getLogger(__name__)

LOOK_S = 60.0
CLOSED_AT_ONCE = 20
"""Runs closed per look, the oldest first: after an upgrade, all runs of the past may be due."""


class Expiry:
    """Expires runs `after_s` seconds after their end; None: never. Not those of another platform on this Redis.

    `runs` is the folder of the runs' folders.
    """

    def __init__(self, redis: Redis, runs: Path, after_s: float | None) -> None:
        self._redis = redis
        self._runs = runs
        self._after_s = after_s
        self._looked_at = float("-inf")

    async def look(self, ended: EndedRuns, now: float) -> None:
        """Close the runs that are due at `now` (Unix seconds), at most once per LOOK_S."""
        if self._after_s is None or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        seconds, microseconds = await self._redis.time()
        # An expiry cannot be undone: one clock that is ahead must not cause it.
        now = min(now, seconds + microseconds / 1e6)
        due = [
            run
            for run, standing in reversed([*ended.runs.items()])
            if standing.state in RESUMABLE and standing.closing is None and now - standing.since > self._after_s
        ]
        if not due:
            return
        try:
            here = await asyncio.to_thread(places_here, self._runs)
        except (StoreError, OSError) as error:
            log.warning("no run expires: %s", error)
            return
        due = [run for run in due if ended.runs[run].place in {"", *here}]
        for run in due[:CLOSED_AT_ONCE]:
            try:
                await close_run(self._redis, run, Closing.EXPIRING)
            except (RunStateError, LookupError, UnreadableRunError) as error:
                log.info("run %s does not expire: %s", run, error)  # it was resumed or deleted meanwhile, or is damaged
