"""Owns who owns each role of a run: its epoch, and the owner's id. Writes of previous owners are rejected.

Must not decide what an owner writes; the library of functions checks the fence with each write.
"""

from __future__ import annotations

import uuid
from typing import Any, Self

from services.contracts import UNOWNED, Fence
from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys


async def become_owner(redis: Redis, keys: RunKeys, role: str, owner: str | None = None, above: int = 0) -> Fence:
    """Make `owner` (by default a new, unique id) the role's owner: from now on, writes of previous owners are rejected.

    A repeated call of the same owner changes nothing. `above`: an epoch that an owner had, also if Redis lost it.
    """
    owner = owner or f"{role}-{uuid.uuid4().hex[:8]}"
    epoch = await call(redis, "become_owner", epoch_key=keys.epoch(role), owner=owner, above=above)
    return Fence(epoch, owner)


async def newest_owner(redis: Redis, keys: RunKeys, role: str) -> Fence:
    """A role's newest owner; UNOWNED before the first."""
    return Fence.parse(await redis.get(keys.epoch(role)))


class RoleOwner:
    """What a process does in one role of a run. Only the role's owner has a fence.

    Once a newer owner exists, each call that sends the fence raises FencedError.
    """

    def __init__(self, redis: Redis, keys: RunKeys, role: str, fence: Fence = UNOWNED) -> None:
        self._redis = redis
        self._keys = keys
        self._epoch_key = keys.epoch(role)
        self.fence = fence

    @classmethod
    async def fenced(cls, redis: Redis, keys: RunKeys, role: str, owner: str | None = None, above: int = 0) -> Self:
        """Become the role's owner, as `owner`, with an epoch above `above`."""
        return cls(redis, keys, role, await become_owner(redis, keys, role, owner, above))

    async def _call(self, function: str, **values: Any) -> int:
        """The integer reply of a function that checks the fence. `values`: all that it declares besides the fence."""
        return await call(self._redis, function, epoch_key=self._epoch_key, fence=self.fence.token, **values)
