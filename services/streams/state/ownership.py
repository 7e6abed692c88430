"""Owns who owns each role of a run: its epoch, and the owner's id. Writes of previous owners are rejected.

Must not write anything else; the functions in lua/ check the fence with each write.
"""

from __future__ import annotations

import uuid

from services.contracts import Fence
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys


async def become_owner(redis: Redis, keys: RunKeys, role: str, owner: str | None = None) -> Fence:
    """Make `owner` (by default a new, unique id) the role's owner: from now on, writes of previous owners are rejected.

    A repeated call of the same owner changes nothing.
    """
    owner = owner or f"{role}-{uuid.uuid4().hex[:8]}"
    return Fence(await call(redis, "become_owner", epoch_key=keys.epoch(role), owner=owner), owner)


async def newest_owner(redis: Redis, keys: RunKeys, role: str) -> Fence:
    """A role's newest owner; UNOWNED before the first. The id is '' where an older release stored the epoch alone."""
    epoch, _, owner = (await redis.get(keys.epoch(role)) or b"0").decode().partition(" ")
    return Fence(int(epoch), owner)
