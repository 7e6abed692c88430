"""Owns what the queue does without while Redis stays short of memory: a whole batch, or groups in flight.

Must not act while anything else can free memory: the learner with a batch, or groups whose responses have room.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from services.contracts import CommittedPolicy, Release
from services.sampler.queue.publication import BatchPublisher
from services.sampler.queue.state import QueueState
from services.sampler.watches.memory import MemoryWait, RedisMemory, withdrawn_at_once
from services.streams.state.stats import HIGH_WATER
from services.waits import REDIS_MEMORY


class MemoryRelief:
    """Keeps a run going that waits for memory."""

    def __init__(self, state: QueueState, memory: RedisMemory, publisher: BatchPublisher) -> None:
        self._state = state
        self._memory = memory
        self._publisher = publisher
        self._wait = MemoryWait(state.context, memory, REDIS_MEMORY)
        self._single = False
        # After a withdrawal: how many groups may be generated at once, doubled with each trained step; else as many
        # would be dispatched again, and withdrawn again.
        self._most: int | None = None
        self._step = 0

    async def room(self, policy: CommittedPolicy) -> int | None:
        """How many groups may be dispatched now; None: as many as have slots. Frees memory if nothing else does."""
        if not await self._memory.short():
            self._wait.done()
            self._single = False
            return self._below_most(policy.step)
        table, step = self._state.table, self._state.next_step
        moves = table.batched or (table.generating and not self._memory.blocked)
        progress = (self._state.verdicts, step, policy.step)
        if not self._wait.pending(self._awaited(), progress) or moves:
            return 0
        if table.kept:
            await self._publish_partial(policy)
        elif len(table.generating) > 1:
            await self._withdraw(policy.step)
        elif not table.generating:
            return await self._dispatch_single()
        return 0

    def _below_most(self, step: int) -> int | None:
        """How many groups may be dispatched while there is memory."""
        if self._most is not None and step > self._step:
            self._most, self._step = 2 * self._most, step
            if self._most >= self._state.recipe.limits.max_inflight_groups:
                self._most = None
        return None if self._most is None else max(0, self._most - len(self._state.table.generating))

    async def end(self) -> None:
        """Withdraw the groups that no batch will take any more, if memory is short; evaluations need it."""
        if await self._memory.short():
            names = [*self._state.table.generating, *self._state.table.kept]
            await self._release(names, "training has ended, and Redis is short of memory")
        self._wait.done()

    def _awaited(self) -> str:
        """What frees memory next."""
        table = self._state.table
        above = f"nothing new is dispatched above {HIGH_WATER:.0%}"
        if table.batched:
            return f"{above}; the learner frees some with rollout step {min(table.batched)}"
        if table.generating and self._memory.blocked:
            groups, replicas = len(table.generating), ", ".join(self._memory.blocked)
            return f"{above}; responses of {groups} groups in flight have no room ({replicas})"
        if table.generating:
            return f"{above}; {len(table.generating)} groups are being generated"
        return f"{above}; nothing of this run is being generated or trained"

    async def _publish_partial(self, policy: CommittedPolicy) -> None:
        step, kept, size = self._state.next_step, len(self._state.table.kept), self._state.recipe.limits.groups_per_step
        await self._publisher.publish_due(policy, partial=True)
        if self._state.next_step > step:
            text = f"rollout step {step} trains {kept} of {size} groups: nothing else frees memory in Redis"
            await self._state.context.event_log.write("redis-memory-partial", text)

    async def _withdraw(self, step: int) -> None:
        """Release the groups that were dispatched last, but never the last one."""
        generating = self._state.table.generating
        names = list(islice(reversed(generating), withdrawn_at_once(len(generating))))
        await self._release(names, f"Redis has no room for the responses of {', '.join(self._memory.blocked)}")
        self._most, self._step = len(generating), step
        self._wait.acted()

    async def _release(self, names: list[str], why: str) -> None:
        if names:
            await asyncio.gather(*(self._state.release(name, Release.DEAD, why) for name in names))
            text = f"{len(names)} groups, {names[0]} first: {why}; their prompts may be drawn again"
            await self._state.context.event_log.write("groups-withdrawn", text)

    async def _dispatch_single(self) -> int:
        if not self._single:
            self._single = True
            text = "nothing of this run can free memory in Redis: groups are dispatched one at a time"
            await self._state.context.event_log.write("redis-memory-single", text)
        return 1
