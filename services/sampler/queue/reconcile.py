"""Owns the reconciliation of the sampler's table with Redis: orphaned groups, requeued groups, a lost batch.

Must not release a group that can still receive a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from services.contracts import Lane, Release
from services.sampler.advantage.filtering import KEPT
from services.sampler.groups import recall
from services.sampler.orphans import Orphans
from services.sampler.queue.state import QueueState

EVERY_S = 5.0


@dataclass(frozen=True)
class LostBatch:
    """The oldest untrained batch, whose `entry` is gone. `groups`: those of this batch and of all later ones."""

    step: int
    entry: str
    groups: list[str]


class Reconciler:
    """Corrects the table where Redis disagrees with it."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._redis, self._keys = state.context.redis, state.context.keys
        self._orphans = Orphans(state.context, Lane.TRAIN)
        self._search_at = time.monotonic() + EVERY_S

    async def release_orphans(self) -> None:
        """Release the groups whose messages are gone from all streams, because no verdict can arrive for them."""
        for name in await self._orphans.among(self._state.table.generating):
            await self._state.context.event_log.write(
                "group-orphaned", f"{name}: its messages are gone from all streams"
            )
            await self._state.release(name, Release.DEAD)
            del self._state.table.generating[name]

    async def restore(self, trained: int) -> None:
        """Every EVERY_S seconds, add requeued groups to the table, and keep the groups of a lost batch again.

        `trained`: the last committed rollout step.
        """
        if time.monotonic() < self._search_at:
            return
        self._search_at = time.monotonic() + EVERY_S
        table = self._state.table
        pending = {member.decode() for member in await self._redis.smembers(self._keys.lane(Lane.TRAIN).pending)}
        unknown = sorted(pending - table.generating.keys() - table.kept.keys())
        requeued = {name: group for name in unknown if (group := await recall(self._redis, self._keys, name))}
        lost = await self._lost_batch([name for name in unknown if name not in requeued], trained)
        table.generating |= requeued
        if lost is not None:
            await self._reclaim(lost)

    async def _lost_batch(self, names: Collection[str], trained: int) -> LostBatch | None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._keys.group(name), "state", "step", "batch")
            facts = await pipe.execute()
        # A sampler of an older release stored no entry.
        batched = [
            (int(step), entry, name)
            for name, (state, step, entry) in zip(names, facts, strict=True)
            if state == b"batched" and entry and int(step) > trained
        ]
        if not batched:
            return None
        step, entry, _ = min(batched)
        if await self._redis.xrange(self._keys.batches, entry, entry):
            return None
        return LostBatch(step, entry.decode(), [name for *_, name in batched])

    async def _reclaim(self, lost: LostBatch) -> None:
        state = self._state
        if not await state.transitions.reclaim_batch(lost.step, lost.entry, lost.groups):
            return
        kept = {name: await recall(self._redis, self._keys, name, KEPT) for name in lost.groups}
        state.table.batches_lost(lost.step, {name: group for name, group in kept.items() if group})
        state.next_step, state.last_step = lost.step, state.recipe.limits.rollout_steps
