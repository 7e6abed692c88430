"""Owns the sampler's care for Redis and its view of the run: trimming streams, watching memory, whether it is paused.

Must not touch a group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from services.contracts import Lane, RunState, Sample, Task, Verdict
from services.metrics import GROUPS, REDIS_MEMORY, STARVATION_RUNG
from services.sampler.ledger import Group
from services.sampler.starvation import Rung
from services.shell import Context
from services.streams.effects import group_counts
from services.streams.journal import read_all
from services.streams.leases import trim
from services.streams.memory import memory_share

log = logging.getLogger(__name__)

EVERY_S = 2.0
CONSUMER_GONE_S = 3600.0
HIGH_WATER = 0.85
"""Share of Redis' maxmemory from which on nothing new is dispatched, so that what is under way has room to finish."""
MEMORY = "redis-memory"
ORPHANED_AFTER_S = 30.0


class Housekeeping:
    """What the queue does beside its groups, every EVERY_S seconds."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._next = 0.0
        self._full: str | None = None
        self._told = False
        self._stands = ("", 0)
        self._look_at = 0.0
        self._suspects: set[str] = set()

    async def tick(self) -> None:
        """Trim the streams and report the counters. Call it often."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        redis, keys = self._context.redis, self._context.keys
        for streams in map(keys.lane, Lane):
            readers = {streams.tasks: "rollout", streams.samples: "verifier", streams.verdicts: "sampler"}
            for stream, consumer_group in readers.items():
                await trim(redis, stream, consumer_group, CONSUMER_GONE_S)
        counts = await group_counts(redis, keys)
        for state, value in counts.model_dump().items():
            GROUPS.labels(keys.run, state).set(value)
        share = await memory_share(redis)
        REDIS_MEMORY.labels(keys.run).set(share or 0.0)
        if share is not None and share > HIGH_WATER:
            self._full = f"{share:.0%} of Redis' maxmemory are in use"
        else:
            self._full = None

    async def orphans(self, generating: Mapping[str, Group]) -> list[str]:
        """Groups under way that no stream mentions, twice in a row; looked for once the oldest has not moved for long.

        The streams are trimmed below what was taken in, so whatever is still to come of a group is an entry of one.
        Only an entry that was damaged, and became a dead letter that names no group, leaves none.
        """
        oldest = min(generating, default="")
        stands = oldest, len(generating[oldest].verdicts) if oldest else 0
        if stands != self._stands:
            self._stands, self._look_at, self._suspects = stands, time.monotonic() + ORPHANED_AFTER_S, set()
        if not oldest or time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + ORPHANED_AFTER_S / 3
        missing = set(generating) - await self._mentioned()
        certain, self._suspects = missing & self._suspects, missing
        return sorted(certain)

    async def _mentioned(self) -> set[str]:
        redis, keys = self._context.redis, self._context.keys
        streams = keys.lane(Lane.TRAIN)
        tasks = await read_all(redis, keys, streams.tasks, Task)
        samples = await read_all(redis, keys, streams.samples, Sample)
        verdicts = await read_all(redis, keys, streams.verdicts, Verdict)
        named = ({one.group for _, one in tasks}, {one.group for _, one in samples}, {one.group for _, one in verdicts})
        return set().union(*named)

    def refused(self, reason: str) -> None:
        """Redis took no more."""
        self._full = reason

    async def short_of_memory(self) -> bool:
        """Whether dispatching has to wait for memory; an event and a wait say so."""
        waits, journal = self._context.waits, self._context.journal
        if self._full is None:
            if self._told:
                self._told = False
                waits.done(MEMORY)
                await journal.event("redis-memory-freed", "dispatching goes on")
            return False
        text = f"{self._full}; nothing new is dispatched above {HIGH_WATER:.0%}"
        waits.pending(MEMORY, text, self._context.record.recipe.limits.stall_timeout_s)
        if not self._told:
            self._told = True
            await journal.event("redis-memory-short", text)
        return True

    async def paused(self) -> bool:
        """Whether somebody paused the run, or it starves and waits for somebody to take it on."""
        redis, keys = self._context.redis, self._context.keys
        state, requested = await redis.hmget(keys.record, "state", "pause_requested")
        starved = await redis.exists(keys.starved)
        return bool(starved) or requested == b"1" or state == RunState.PAUSED.value.encode()

    def report_rung(self, rung: Rung) -> None:
        """Show the rung of the starvation ladder in the metrics."""
        STARVATION_RUNG.labels(self._context.keys.run).set(int(rung))
