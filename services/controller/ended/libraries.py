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
from services.streams.state.heartbeat import live_by_run

log = logging.getLogger(__name__)

LOOK_S = 60.0


class Libraries:
    """Deletes libraries that two looks in a row found unused, at most one look per LOOK_S."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._looked_at = float("-inf")
        self._unused: frozenset[str] = frozenset()
        self._forbidden = False

    async def look(self, runs: Collection[str]) -> None:
        """Delete what has been unused since the last look. `runs`: all runs that may have processes.

        A process that announces no library (one of an earlier release) may use any of them.
        """
        if self._forbidden or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        live = await live_by_run(self._redis, [None, *runs])
        used = {process.library for processes in live.values() for process in processes} | {library().name}
        try:
            unused = frozenset(await list_libraries(self._redis)) - used if "" not in used else frozenset()
            for name in sorted(unused & self._unused):
                await delete_library(self._redis, name)
                log.info("deleted the functions %s from Redis: no process uses them", name)
        except LibrariesForbiddenError as error:
            self._forbidden = True
            log.warning("functions of earlier releases stay in Redis: %s; docs/operations/redis.md, Users", error)
            return
        self._unused = unused - self._unused
