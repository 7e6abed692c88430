"""Owns the epochs of a run's roles: who owns a role now, and whose writes are rejected.

Must not write anything else; the functions in lua/ check the epoch with each write.
"""

from __future__ import annotations

from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys


async def become_owner(redis: Redis, keys: RunKeys, role: str) -> int:
    """Raise the role's epoch and return it: from now on, writes of previous owners are rejected.

    A repeated call (the reply was lost) raises it twice, which fences no other owner.
    """
    return await call(redis, "become_owner", epoch_key=keys.epoch(role))


async def owner_epoch(redis: Redis, keys: RunKeys, role: str) -> int:
    """The epoch of a role's newest owner; 0 before the first."""
    return int(await redis.get(keys.epoch(role)) or 0)
