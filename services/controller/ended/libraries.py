"""Owns the end of function libraries that no process uses any more: Redis keeps what each release has loaded.

Must not delete a library that a live process announces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from services.streams.connection.client import Redis
from services.streams.connection.functions import library
from services.streams.connection.libraries import LibrariesForbiddenError, delete_library, list_libraries
from services.streams.keys import RunKeys
from services.streams.state.heartbeat import live_by_run
from services.streams.state.stats import HIGH_WATER, memory_use

log = logging.getLogger(__name__)

LOOK_S = 60.0
EARLIER_HEARTBEATS = "processes"
"""The name of the key in which earlier releases list a run's processes. It stays until the run has ended."""


class Libraries:
    """Deletes each library that two looks in a row found unused. There is at most one look per LOOK_S."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._looked_at = float("-inf")
        self._unused: frozenset[str] = frozenset()
        self._forbidden = False

    async def look(self, runs: Collection[str]) -> None:
        """Delete what no process has announced in this look and the last one. `runs`: all runs that may have processes.

        Nothing while a run has what processes of an earlier release leave, which announce no library; nor while Redis
        is short of memory, because a process whose library is gone could not load it again.
        """
        if self._forbidden or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        if await self._needed(runs):
            self._unused = frozenset()
            return
        live = await live_by_run(self._redis, [None, *runs])
        used = {process.library for processes in live.values() for process in processes} | {library().name}
        try:
            unused = frozenset(await list_libraries(self._redis)) - used
            for name in sorted(unused & self._unused):
                await delete_library(self._redis, name)
                log.info("deleted the functions %s from Redis: no process uses them", name)
        except LibrariesForbiddenError as error:
            self._forbidden = True
            log.warning("functions of earlier releases stay in Redis: %s; docs/operations/redis.md, Users", error)
            return
        self._unused = unused - self._unused

    async def _needed(self, runs: Collection[str]) -> bool:
        """Whether any library may still be needed."""
        use = await memory_use(self._redis)
        earlier = [RunKeys(run).key(EARLIER_HEARTBEATS) for run in runs]
        return bool(use.share > HIGH_WATER or (earlier and await self._redis.exists(*earlier)))
