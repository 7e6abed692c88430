"""Owns the dispatch of an evaluation's prompts into free slots and memory, and their withdrawal when Redis is full.

Must not judge a prompt.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from services.contracts import Lane
from services.process.hosting import Context
from services.sampler.evaluation.progress import EvaluationProgress
from services.sampler.groups import Group
from services.sampler.watches.memory import MemoryWait, RedisMemory, withdrawn_at_once
from services.streams.connection.functions import RedisFullError
from services.streams.state.group_state import TASKS_AT_ONCE, GroupTransitions
from services.streams.state.heartbeat import live_processes

SHARE_BESIDE_TRAINING = 0.5
"""The share of the fleet's sequence slots for an evaluation beside training. Replicas serve evaluation tasks first."""
WAIT = "evaluation-memory"


class EvaluationDispatch:
    """Sends the prompts of one evaluation of one set. `beside_training`: into SHARE_BESIDE_TRAINING of the slots."""

    def __init__(
        self,
        context: Context,
        transitions: GroupTransitions,
        memory: RedisMemory,
        progress: EvaluationProgress,
        *,
        beside_training: bool,
    ) -> None:
        self._context = context
        self._transitions = transitions
        self._memory = memory
        self._progress = progress
        self._beside_training = beside_training
        self._wait = MemoryWait(context, memory, WAIT)
        # After a withdrawal: how many prompts may be in flight, less those that have ended. Without this limit, as many
        # would be dispatched again, and withdrawn again.
        self._most: int | None = None

    async def run(self, text: str) -> None:
        """Dispatch waiting prompts into the free slots, as long as Redis has memory for them. `text` names them.

        If Redis is full and waiting does not help, prompts in flight wait again.
        """
        progress = self._progress
        slots = await self._slots()
        while True:
            room = min(await self._room(text), slots - len(progress.dispatched), len(progress.waiting))
            if room <= 0:
                return
            names = list(islice(progress.waiting, room))
            try:
                await self._transitions.dispatch(Lane.EVALUATION, [progress.tasks[name] for name in names], None)
            except RedisFullError as error:
                self._memory.refused(str(error))
                return
            for name in names:
                progress.dispatched[name] = Group(progress.tasks[name])
                progress.waiting.popleft()

    def end(self) -> None:
        """End the wait for memory."""
        self._wait.done()

    async def _slots(self) -> int:
        """How many prompts may be in flight."""
        if not self._beside_training:
            return len(self._progress.tasks)
        processes = await live_processes(self._context.redis, self._context.keys.run)
        replicas = sum(process.service == "rollout" and process.state == "ready" for process in processes)
        sequences = replicas * self._context.record.recipe.rollout.max_sequences * SHARE_BESIDE_TRAINING
        return max(1, int(sequences / self._progress.samples))

    async def _room(self, text: str) -> int:
        """How many prompts may be dispatched now: those that fit. When waiting for memory does not help: one at a time.

        What fits is computed from the memory that is free now; other runs may take it as well. Then responses find no
        room, and the prompts that were dispatched last are withdrawn.
        """
        progress, memory = self._progress, self._memory
        if not await memory.short():
            self._wait.done()
            room = memory.room(progress.prompt_bytes, len(progress.dispatched))
            most = TASKS_AT_ONCE if self._most is None else self._most + progress.ended - len(progress.dispatched)
            return min(TASKS_AT_ONCE, most, TASKS_AT_ONCE if room is None else room)
        if not progress.waiting and not memory.blocked:
            self._wait.done()
            return 0
        is_still = self._wait.pending(f"{text} wait for it", (progress.verdicts, progress.ended))
        if is_still and memory.blocked and len(progress.dispatched) > 1:
            await self._withdraw()
        return 1 if is_still and not progress.dispatched else 0

    async def _withdraw(self) -> None:
        """Let the prompts that were dispatched last wait again, but never the last one."""
        progress = self._progress
        last = list(islice(reversed(progress.dispatched), withdrawn_at_once(len(progress.dispatched))))
        done = await asyncio.gather(
            *(self._transitions.withdraw(Lane.EVALUATION, name, progress.samples) for name in last)
        )
        self._wait.acted()
        names = [name for name, withdrawn in zip(last, done, strict=True) if withdrawn]
        if not names:
            return
        for name in names:
            del progress.dispatched[name]
            progress.waiting.appendleft(name)
        self._most = len(progress.dispatched) - progress.ended
        text = f"Redis has no room for the responses of {', '.join(self._memory.blocked)}; they are dispatched again"
        await self._context.event_log.write("prompts-withdrawn", f"{len(names)} prompts, {names[0]} first: {text}")
