"""Owns the reconciliation of the sampler with Redis: orphaned groups, groups that differ, a lost batch or version.

Must not release a group that can still receive a verdict.
"""

from __future__ import annotations

import logging

from services.contracts import Batch, CommittedPolicy, Lane, Release
from services.sampler.groups import recall
from services.sampler.queue.state import QueueState
from services.sampler.queue.waits import VERSION
from services.sampler.watches.audit import Audit
from services.streams.state.events import read_all
from services.streams.state.group_state import BATCHED, KEPT, PENDING, read_fields
from services.streams.state.heartbeat import live_processes

log = logging.getLogger(__name__)

PENDING_PER_LOOK = 512
ORPHANED, LOST = "its messages are gone from all streams", "Redis lost it"


class Reconciler:
    """Corrects the table where Redis disagrees with it: Redis is right."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._redis, self._keys = state.context.redis, state.context.keys
        self._audit = Audit(state.context, Lane.TRAIN)
        self._cursor = 0

    async def look(self, trained: int) -> None:
        """Look at the next groups, if it is time. `trained`: the last committed rollout step."""
        if not self._audit.due:
            return
        table = self._state.table
        found = await self._audit.look(table.generating, table.kept)
        for name in found.orphaned:
            await self._report("group-orphaned", f"{name}: {ORPHANED}")
            await self._state.release(name, Release.DEAD, ORPHANED)
        for name in found.changed:
            table.remove(name)
        await self._adopt(found.changed + table.unknown(await self._some_pending()), trained)
        await self._keep_lost_batch(trained)

    async def fleet_waits(self, policy: CommittedPolicy) -> bool:
        """Whether every replica generates with a policy version that Redis lost in a failover.

        No response of it can be trained. A learner that has lost its last steps restarts, and announces a newer one.
        """
        state, waits, announced = self._state, self._state.context.waits, max(policy.announced, policy.version)
        if state.newest_version > announced:
            live = await live_processes(self._redis, self._keys.run)
            held = [each.version or 0 for each in live if each.service == "rollout" and each.state == "ready"]
            if held and min(held) > announced:
                text = f"the learner to announce a version above {min(held)}, which Redis lost; it knows {announced}"
                waits.pending(VERSION, text, state.recipe.limits.stall_timeout_s)
                return True
        waits.done(VERSION)
        return False

    async def _some_pending(self) -> list[str]:
        """The next of the groups that Redis counts as pending."""
        pending = self._keys.lane(Lane.TRAIN).pending
        self._cursor, members = await self._redis.sscan(pending, self._cursor, count=PENDING_PER_LOOK)
        return [member.decode() for member in members]

    async def _adopt(self, names: list[str], trained: int) -> None:
        """Add groups as Redis has them. One whose hash is gone counts as dead; one that ended is left alone."""
        table, names = self._state.table, list(dict.fromkeys(names))
        gone = await recall(self._redis, self._keys, table, names)
        table.trained(trained)
        if restored := [name for name in names if name not in gone]:
            await self._report("group-restored", f"{len(restored)} groups as Redis has them, {restored[0]} first")
        for name, [state] in zip(gone, await read_fields(self._redis, self._keys, gone, ("state",)), strict=True):
            if state is None and await self._state.transitions.release(Lane.TRAIN, name, Release.DEAD, 0, LOST):
                await self._report("group-dead", f"{name}: {LOST}")

    async def _keep_lost_batch(self, trained: int) -> None:
        """Keep the groups of the oldest untrained batch, and of all later ones, again if Redis lost that batch."""
        state, step = self._state, trained + 1
        if state.next_step <= step:
            return
        entry, batches = await self._lost_entry(step), state.table.batched
        if entry is None or not await state.transitions.reclaim_batch(step, entry, batches):
            return
        names = [name for batch in batches.values() for name in batch]
        state.table.batches_lost(step)
        await recall(self._redis, self._keys, state.table, names)
        state.next_step, state.last_step = step, state.recipe.limits.rollout_steps

    async def _lost_entry(self, step: int) -> str | None:
        """The entry of the batch of `step`, if it is gone; "" if Redis lost its publication; None if it is there."""
        names = self._state.table.batched.get(step, ())
        if not names:  # Redis lost its commit too, or only that: then its groups are found among the pending ones
            batches = await read_all(self._redis, self._keys, self._keys.batches, Batch)
            return None if any(batch.step == step for _, batch in batches) else ""
        [[stored, entry]] = await read_fields(self._redis, self._keys, names[:1], ("state", "batch"))
        if stored in (KEPT.encode(), PENDING.encode()):
            return ""
        if entry is None or stored != BATCHED.encode() or await self._redis.xrange(self._keys.batches, entry, entry):
            return None  # a sampler of an older release stored no entry
        return entry.decode()

    async def _report(self, phase: str, text: str) -> None:
        await self._state.context.event_log.write(phase, text)
