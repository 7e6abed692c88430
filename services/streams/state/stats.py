"""Owns the look at a run's streams from outside: how much they hold, how much is under lease, whether a lease is stuck.

Must not change a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.streams.connection.client import Redis

LEASES_LOOKED_AT = 100


@dataclass(frozen=True)
class StreamFigures:
    """A stream and its one consumer group.

    `entries`: all that it holds, those that were acked and not yet trimmed too. `pending`: under lease. `lag`: not yet
    delivered; None where the server cannot tell (an undelivered entry was deleted). `oldest_idle_s`: the longest that
    one of the leases looked at was neither renewed nor taken over; 0 without leases.
    """

    entries: int = 0
    pending: int = 0
    lag: int | None = 0
    oldest_idle_s: float = 0.0


async def stream_figures(redis: Redis, readers: Mapping[str, str], lease_s: float) -> dict[str, StreamFigures]:
    """The figures of streams by key; `readers`: the consumer group of each. Two round trips, however long they are.

    LEASES_LOOKED_AT leases of a stream are looked at: those that have lapsed (`lease_s` seconds without renewal) where
    there are any, else the oldest.
    """
    found: dict[str, StreamFigures] = {}
    async with redis.pipeline(transaction=False) as pipe:
        for stream in readers:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)
        replies = await pipe.execute(raise_on_error=False)
    for stream, entries, groups in zip(readers, replies[::2], replies[1::2], strict=True):
        facts = _group(groups, readers[stream])
        if isinstance(entries, int):
            found[stream] = StreamFigures(entries, facts.get("pending", 0), facts.get("lag", entries))
    leased = [stream for stream, one in found.items() if one.pending]
    idle = await _idle(redis, {stream: readers[stream] for stream in leased}, lease_s)
    return {
        stream: StreamFigures(one.entries, one.pending, one.lag, idle.get(stream, 0.0))
        for stream, one in ((stream, found.get(stream, StreamFigures())) for stream in readers)
    }


def _group(reply: Any, name: str) -> dict[str, Any]:
    """What is known of a consumer group; nothing before it exists."""
    if isinstance(reply, Exception):
        return {}
    return next((one for one in reply if one["name"] == name.encode()), {})


async def _idle(redis: Redis, readers: Mapping[str, str], lease_s: float) -> dict[str, float]:
    """By stream: the longest that a lease was not renewed for, in seconds."""
    if not readers:
        return {}
    lapsed_ms = int(lease_s * 1000)
    async with redis.pipeline(transaction=False) as pipe:
        for stream, reader in readers.items():
            pipe.xpending_range(stream, reader, "-", "+", LEASES_LOOKED_AT, idle=lapsed_ms)
            pipe.xpending_range(stream, reader, "-", "+", LEASES_LOOKED_AT)
        replies = await pipe.execute(raise_on_error=False)
    found = {}
    for stream, lapsed, oldest in zip(readers, replies[::2], replies[1::2], strict=True):
        leases = [one for part in (lapsed, oldest) if isinstance(part, list) for one in part]
        found[stream] = max((one["time_since_delivered"] / 1000 for one in leases), default=0.0)
    return found


async def memory_share(redis: Redis) -> float | None:
    """The share of Redis' maxmemory that is in use; None where it has no limit."""
    info = await redis.info("memory")
    limit = int(info.get("maxmemory", 0))
    return int(info["used_memory"]) / limit if limit else None
