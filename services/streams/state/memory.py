"""Owns the view of Redis' own memory.

Must not free any.
"""

from __future__ import annotations

from services.streams.connection.client import Redis


async def memory_share(redis: Redis) -> float | None:
    """The share of Redis' maxmemory that is in use; None where it has no limit."""
    info = await redis.info("memory")
    limit = int(info.get("maxmemory", 0))
    return int(info["used_memory"]) / limit if limit else None
