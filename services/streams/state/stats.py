"""Owns figures of streams and memory: lengths, leases, whether a lease is stuck, how full Redis is.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.streams.connection.client import Redis

LEASES_CHECKED = 100


@dataclass(frozen=True)
class StreamFigures:
    """A stream and its one consumer group.

    `entries`: all entries, including those acked and not yet trimmed. `pending`: under lease. `lag`: not yet delivered;
    None if the server does not know (an undelivered entry was deleted). `oldest_idle_s`: the longest time for which one
    of the checked leases was neither renewed nor taken over; 0 without leases.
    """

    entries: int = 0
    pending: int = 0
    lag: int | None = 0
    oldest_idle_s: float = 0.0


async def stream_figures(redis: Redis, readers: Mapping[str, str], lease_s: float) -> dict[str, StreamFigures]:
    """The figures of streams by key; `readers`: the consumer group of each. Takes two round trips.

    LEASES_CHECKED leases per stream are checked: the lapsed ones (`lease_s` seconds without renewal) if there are any,
    else the oldest.
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
    leased = [stream for stream, figures in found.items() if figures.pending]
    idle = await _idle(redis, {stream: readers[stream] for stream in leased}, lease_s)
    return {
        stream: replace(found.get(stream, StreamFigures()), oldest_idle_s=idle.get(stream, 0.0)) for stream in readers
    }


def _group(reply: Any, name: str) -> dict[str, Any]:
    """A consumer group's fields; empty before it exists."""
    if isinstance(reply, Exception):
        return {}
    return next((group for group in reply if group["name"] == name.encode()), {})


async def _idle(redis: Redis, readers: Mapping[str, str], lease_s: float) -> dict[str, float]:
    """By stream: the longest time without a renewal of a lease, in seconds."""
    if not readers:
        return {}
    lapsed_ms = int(lease_s * 1000)
    async with redis.pipeline(transaction=False) as pipe:
        for stream, reader in readers.items():
            pipe.xpending_range(stream, reader, "-", "+", LEASES_CHECKED, idle=lapsed_ms)
            pipe.xpending_range(stream, reader, "-", "+", LEASES_CHECKED)
        replies = await pipe.execute(raise_on_error=False)
    found = {}
    for stream, lapsed, oldest in zip(readers, replies[::2], replies[1::2], strict=True):
        leases = [lease for part in (lapsed, oldest) if isinstance(part, list) for lease in part]
        found[stream] = max((lease["time_since_delivered"] / 1000 for lease in leases), default=0.0)
    return found


async def memory_use(redis: Redis) -> tuple[int, int]:
    """The bytes that Redis uses, and its maxmemory; 0 if it has no limit."""
    info = await redis.info("memory")
    return int(info["used_memory"]), int(info.get("maxmemory", 0))
