"""Owns the sampler's periodic maintenance of Redis: trimming, exporting metrics and measuring memory.

Must not read or change a group that has not ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter

from services.contracts import Cause, Lane
from services.metrics import (
    DEAD_LETTERS,
    GROUPS,
    STARVATION_LEVEL,
    STREAM_ENTRIES,
    STREAM_IDLE_SECONDS,
    STREAM_LAG,
    STREAM_PENDING,
)
from services.process.hosting import Context
from services.sampler.queue.starvation import Level
from services.sampler.watches.memory import RedisMemory
from services.streams.delivery.consumer import trim
from services.streams.delivery.leases import restart_leases
from services.streams.keys import STREAM_READERS
from services.streams.memory_bound import longest_streams
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import trim_released
from services.streams.state.stats import stream_figures

log = logging.getLogger(__name__)

EVERY_S = 2.0
CONSUMER_GONE_S = 3600.0


class Maintenance:
    """Maintains a run's Redis keys every EVERY_S seconds. `memory`: what it measured of Redis'."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.memory = RedisMemory(context)
        self._letters_after = "0-0"
        self._leases_checked_at = time.monotonic()
        STARVATION_LEVEL.labels(context.keys.run).set(0)

    async def run(self) -> None:
        """Trim what has ended, export the counters and measure Redis' memory, until cancelled."""
        while True:
            await self._maintain()
            await asyncio.sleep(EVERY_S)

    async def _maintain(self) -> None:
        redis, keys = self._context.redis, self._context.keys
        for lane in Lane:
            streams, longest = keys.lane(lane), longest_streams(self._context.record.recipe, lane)
            for name, consumer_group in STREAM_READERS.items():
                await trim(redis, getattr(streams, name), consumer_group, CONSUMER_GONE_S, longest[name])
            await trim_released(redis, keys, lane)
        if time.monotonic() - self._leases_checked_at > self._context.record.recipe.limits.lease_s:
            self._leases_checked_at = time.monotonic()
            for lane in Lane:
                for name, consumer_group in STREAM_READERS.items():
                    await restart_leases(redis, getattr(keys.lane(lane), name), consumer_group)
        counts = await group_counts(redis, keys)
        for state, value in counts.model_dump().items():
            GROUPS.labels(keys.run, state).set(value)
        await self._show_streams()
        await self.memory.look()

    async def _show_streams(self) -> None:
        """Export each stream's entries, pending entries, lag and oldest lease; and all dead letters, by cause."""
        redis, keys = self._context.redis, self._context.keys
        for lane in Lane:
            readers = dict(zip(keys.streams(lane).items(), STREAM_READERS.values(), strict=True))
            by_stream = {stream: reader for (_, stream), reader in readers.items()}
            found = await stream_figures(redis, by_stream, self._context.record.recipe.limits.lease_s)
            for name, stream in keys.streams(lane).items():
                figures = found[stream]
                STREAM_ENTRIES.labels(keys.run, name).set(figures.entries)
                STREAM_PENDING.labels(keys.run, name).set(figures.pending)
                STREAM_LAG.labels(keys.run, name).set(math.nan if figures.lag is None else figures.lag)
                STREAM_IDLE_SECONDS.labels(keys.run, name).set(figures.oldest_idle_s)
        letters = await self._context.event_log.dead_letters(self._letters_after)
        self._letters_after = letters[-1][0] if letters else self._letters_after
        by_cause = Counter(letter.cause for _, letter in letters)
        for cause in Cause:
            # Old letters are counted before the first scrape, so a rate over the counter does not include them.
            DEAD_LETTERS.labels(keys.run, cause.value).inc(by_cause[cause])

    def report_level(self, level: Level) -> None:
        """Export the starvation level."""
        STARVATION_LEVEL.labels(self._context.keys.run).set(int(level))
