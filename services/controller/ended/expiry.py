"""Owns when a run that has ended expires.

Must not delete anything: `closings` carries out what is closed here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.contracts import Closing
from services.storage.errors import StoreError
from services.storage.mirror import places_here
from services.streams.connection.client import Redis
from services.streams.state.ended.closing import close_run
from services.streams.state.ended.standings import places_of, unclosed_before
from services.streams.state.run_record import UnreadableRunError
from services.streams.state.runs import RunStateError

log = logging.getLogger(__name__)

LOOK_S = 60.0
CLOSED_AT_ONCE = 20
"""Runs closed per look, the oldest first: after an upgrade, all runs of the past may be due."""
READ_AT_ONCE = 500


class Expiry:
    """Expires runs `after_s` seconds after their end; None: never. Not those of another platform on this Redis.

    `runs` is the folder of the runs' folders.
    """

    def __init__(self, redis: Redis, runs: Path, after_s: float | None) -> None:
        self._redis = redis
        self._runs = runs
        self._after_s = after_s
        self._looked_at = float("-inf")

    async def look(self, now: float) -> None:
        """Close the runs that are due at `now` (Unix seconds), at most once per LOOK_S."""
        if self._after_s is None or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        seconds, microseconds = await self._redis.time()
        # An expiry cannot be undone: one clock that is ahead must not cause it.
        now = min(now, seconds + microseconds / 1e6)
        for run in await self._due(now - self._after_s):
            try:
                await close_run(self._redis, run, Closing.EXPIRING)
            except (RunStateError, LookupError, UnreadableRunError) as error:
                log.info("run %s does not expire: %s", run, error)  # it was resumed or deleted meanwhile, or is damaged

    async def _due(self, before: float) -> list[str]:
        """The runs of this platform that ended before a time, the oldest first, at most CLOSED_AT_ONCE."""
        due, first, here = list[str](), 0, set[str]()
        while len(due) < CLOSED_AT_ONCE:
            ends = await unclosed_before(self._redis, before, first, READ_AT_ONCE)
            if ends and not here:
                try:
                    here = {"", *await asyncio.to_thread(places_here, self._runs)}
                except (StoreError, OSError) as error:
                    log.warning("no run expires: %s", error)
                    return []
            due += [
                run for run, place in (await places_of(self._redis, [end.run for end in ends])).items() if place in here
            ]
            first += len(ends)
            if len(ends) < READ_AT_ONCE:
                break
        return due[:CLOSED_AT_ONCE]
