"""Owns the search for what the sampler's memory and Redis disagree about: open groups it lacks, a batch that is gone.

Must not change anything.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from services.contracts import Lane
from services.sampler.groups import Group, Ledger, recall
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys

EVERY_S = 5.0


@dataclass(frozen=True)
class LostBatch:
    """The oldest batch that nobody trained, whose `entry` is gone; `groups` are its own and those of later ones."""

    step: int
    entry: str
    groups: list[str]


@dataclass(frozen=True)
class Strays:
    """`groups` are pending and were unknown: dead letters redriven. `lost`: see LostBatch."""

    groups: dict[str, Group] = field(default_factory=dict)
    lost: LostBatch | None = None


class Search:
    """Looks every EVERY_S seconds."""

    def __init__(self, redis: Redis, keys: RunKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._look_at = time.monotonic() + EVERY_S

    async def look(self, ledger: Ledger, trained: int) -> Strays:
        """What was found, once it is time. `trained`: the last rollout step that is committed."""
        if time.monotonic() < self._look_at:
            return Strays()
        self._look_at = time.monotonic() + EVERY_S
        pending = {one.decode() for one in await self._redis.smembers(self._keys.lane(Lane.TRAIN).pending)}
        others = sorted(pending - ledger.generating.keys() - ledger.kept.keys())
        found = {name: group for name in others if (group := await recall(self._redis, self._keys, name))}
        return Strays(found, await self._lost([name for name in others if name not in found], trained))

    async def _lost(self, names: Collection[str], trained: int) -> LostBatch | None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._keys.group(name), "state", "step", "batch")
            facts = await pipe.execute()
        # A sampler of an older release noted no entry.
        out = [(int(step), entry, name) for name, (state, step, entry) in zip(names, facts, strict=True)
               if state == b"batched" and entry and int(step) > trained]  # fmt: skip
        if not out:
            return None
        step, entry, _ = min(out)
        if await self._redis.xrange(self._keys.batches, entry, entry):
            return None
        return LostBatch(step, entry.decode(), [name for *_, name in out])
