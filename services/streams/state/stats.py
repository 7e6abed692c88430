"""Owns figures of streams and memory: lengths, leases, whether a lease is stuck, how full Redis is.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from services.streams.connection.client import Redis
from services.streams.connection.functions import REFUSING
from services.streams.delivery.leases import RETURNED

HIGH_WATER = 0.85
"""Share of Redis' maxmemory above which nothing new is dispatched, so that in-flight groups have room to finish."""
LEASES_CHECKED = 100
NOT_YET = ("no such key", "NOGROUP ")
"""How the server's errors start that say: the stream, or its consumer group, does not exist."""


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

    def ask(pipe: Any) -> None:
        for stream in readers:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)

    replies = await _replies(redis, ask)
    for stream, entries, groups in zip(readers, replies[::2], replies[1::2], strict=True):
        facts = _group(groups, readers[stream])
        found[stream] = StreamFigures(entries, facts.get("pending", 0), facts.get("lag", entries))
    leased = [stream for stream, figures in found.items() if figures.pending]
    idle = await _idle(redis, {stream: readers[stream] for stream in leased}, lease_s)
    return {stream: replace(figures, oldest_idle_s=idle.get(stream, 0.0)) for stream, figures in found.items()}


async def _replies(redis: Redis, ask: Callable[[Any], None]) -> list[Any]:
    """The replies to the commands that `ask` adds to a pipeline, in one round trip; [] about what does not exist yet.

    Any other error is raised, after the client's retries.
    """

    async def attempt() -> list[Any]:
        async with redis.pipeline(transaction=False) as pipe:
            ask(pipe)
            replies = await pipe.execute(raise_on_error=False)
        return [_known(reply) for reply in replies]

    async def failed(_: Exception) -> None:
        """The pipeline has given its connection back."""

    # Here, because the client does not retry a pipeline whose errors are not raised.
    found: list[Any] = await redis.get_retry().call_with_retry(attempt, failed)
    return found


def _known(reply: Any) -> Any:
    if isinstance(reply, ResponseError) and str(reply).startswith(NOT_YET):
        return []
    if isinstance(reply, Exception):
        raise reply
    return reply


def _group(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """A consumer group's fields; empty before it exists."""
    return next((group for group in groups if group["name"] == name.encode()), {})


async def _idle(redis: Redis, readers: Mapping[str, str], lease_s: float) -> dict[str, float]:
    """By stream: the longest time without a renewal of a lease, in seconds. A returned entry is under no lease."""
    if not readers:
        return {}
    held_by_none = RETURNED.encode()
    lapsed_ms = int(lease_s * 1000)

    def ask(pipe: Any) -> None:
        for stream, reader in readers.items():
            pipe.xpending_range(stream, reader, "-", "+", LEASES_CHECKED, idle=lapsed_ms)
            pipe.xpending_range(stream, reader, "-", "+", LEASES_CHECKED)

    replies = await _replies(redis, ask)
    return {
        stream: max(
            (lease["time_since_delivered"] / 1000 for lease in (*lapsed, *oldest) if lease["consumer"] != held_by_none),
            default=0.0,
        )
        for stream, lapsed, oldest in zip(readers, replies[::2], replies[1::2], strict=True)
    }


class MemoryUse(NamedTuple):
    """The bytes that Redis uses, and its maxmemory; 0 if it has none, or if that is not known.

    `volume_short`: it refuses new data for lack of space on its volume, and its own maxmemory is not known.
    """

    used: int
    limit: int
    volume_short: bool = False

    @property
    def share(self) -> float:
        """The part of maxmemory in use; 0 without a limit, 1 while new data are refused."""
        return 1.0 if self.volume_short else self.used / self.limit if self.limit else 0.0


async def memory_use(redis: Redis) -> MemoryUse:
    """What Redis uses of its memory."""
    info = await redis.info("memory")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    return MemoryUse(used, 0, volume_short=True) if limit == REFUSING else MemoryUse(used, limit)
