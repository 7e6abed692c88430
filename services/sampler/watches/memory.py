"""Owns what the sampler knows of Redis' memory: whether dispatching has to wait for it, and whether that helps.

Must not free memory; queue/relief.py does.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import nan

from services.metrics import REDIS_MEMORY as SHARE
from services.process.hosting import Context
from services.streams.state.heartbeat import live_processes
from services.streams.state.stats import HIGH_WATER, memory_use
from services.waits import REDIS_MEMORY

VOLUME_SHORT = "Redis refuses new data, because its volume is short of space"
STILL_LOOKS = 5
"""Measurements in a row without progress after which waiting for memory does not help."""
WITHDRAWN_SHARE = 0.25
"""Of the groups in flight, withdrawn at once when their responses find no room."""


def withdrawn_at_once(in_flight: int) -> int:
    """How many groups are withdrawn at once of those in flight: WITHDRAWN_SHARE, at least one, but never the last."""
    return min(in_flight - 1, max(1, int(WITHDRAWN_SHARE * in_flight)))


class RedisMemory:
    """Redis' memory, measured by the sampler's maintenance, one look after another."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reported = False
        self._below: int | None = None
        self.looks = 0
        self.full: str | None = None
        """Why nothing may be dispatched; None if it may."""
        self.blocked: list[str] = []
        """Replicas of the run that hold a finished response which Redis rejected, as their heartbeats report."""

    async def look(self) -> None:
        """Measure the share of maxmemory in use, and export it; NaN if maxmemory is not known."""
        use = await memory_use(self._context.redis)
        SHARE.labels(self._context.keys.run).set(nan if use.volume_short else use.share)
        above = use.share > HIGH_WATER
        self._below = int(HIGH_WATER * use.limit) - use.used if use.limit else 0 if use.volume_short else None
        why = VOLUME_SHORT if use.volume_short else f"{use.share:.0%} of Redis' maxmemory is in use"
        self.full = why if above else None
        self.blocked = await self._blocked_replicas() if above else []
        self.looks += 1

    def room(self, size: int, in_flight: int) -> int | None:
        """How many more items of at most `size` bytes fit below the high-water mark; None without a limit.

        Those in flight count as if they held nothing yet. One fits always: waiting would not help it.
        """
        if self._below is None:
            return None
        return max(self._below // size, 1) - in_flight

    def refused(self, reason: str) -> None:
        """Note that Redis rejected a write for lack of memory."""
        self.full = reason

    async def short(self) -> bool:
        """Whether dispatching has to wait for memory. Reports the start and the end of a shortage as events."""
        event_log = self._context.event_log
        if self._reported and self.full is None:
            self._reported = False
            await event_log.write("redis-memory-freed", "dispatching continues")
        elif not self._reported and self.full is not None:
            self._reported = True
            await event_log.write(
                "redis-memory-short", f"{self.full}; nothing new is dispatched above {HIGH_WATER:.0%}"
            )
        return self.full is not None

    async def _blocked_replicas(self) -> list[str]:
        processes = await live_processes(self._context.redis, self._context.keys.run)
        return [
            process.id
            for process in processes
            if process.service == "rollout" and any(wait.name == REDIS_MEMORY for wait in process.waits)
        ]


class MemoryWait:
    """A wait for memory under a name of its own, and how long nothing has moved in it."""

    def __init__(self, context: Context, memory: RedisMemory, name: str) -> None:
        self._context, self._memory, self._name = context, memory, name
        self._progress: Hashable = None
        self._since = 0

    def pending(self, awaited: str, progress: Hashable) -> bool:
        """Report what is awaited. True once `progress` was the same for STILL_LOOKS looks: waiting does not help."""
        waits, deadline_s = self._context.waits, self._context.record.recipe.limits.stall_timeout_s
        if progress != self._progress:
            waits.done(self._name)
            self._progress, self._since = progress, self._memory.looks
        waits.pending(self._name, f"{self._memory.full}; {awaited}", deadline_s)
        return self._memory.looks - self._since >= STILL_LOOKS

    def acted(self) -> None:
        """Call this when the caller has freed memory: `pending` is False until the next look, then True again.

        By then the look has measured what the freed memory changed.
        """
        self._since = self._memory.looks - STILL_LOOKS + 1

    def done(self) -> None:
        """End the wait."""
        self._context.waits.done(self._name)
        self._progress = None
