"""Owns the schedule of evaluations: before training, every N rollout steps beside it, and after it; one at a time.

Must not evaluate; the evaluator does.
"""

from __future__ import annotations

import asyncio
from collections import deque

from services.contracts import AFTER, BEFORE, Lane
from services.process.hosting import Context
from services.sampler.evaluation.evaluator import Evaluator
from services.waits import cancel_and_wait

STEP = "step-"
EVERY = "evaluation.every"


def due_steps(every: int, total: int, known: int, step: int) -> list[int]:
    """The rollout steps in (known, step] after which an evaluation is due, without the last step, which has its own."""
    if every == 0:
        return []
    return [due for due in range((known // every + 1) * every, step + 1, every) if due < total]


class EvaluationSchedule:
    """Starts evaluations as rollout steps are committed. Training never waits for an evaluation.

    One evaluation runs at a time, and one may wait. When another one becomes due, the waiting one is skipped, and an
    event reports it.
    """

    def __init__(self, context: Context, evaluator: Evaluator) -> None:
        self._context = context
        self._evaluator = evaluator
        self._total = context.record.recipe.limits.rollout_steps
        self._known = 0
        self._first: deque[str] = deque()
        self._waiting: str | None = None
        self._running: asyncio.Task[bool] | None = None

    @property
    def _every(self) -> int:
        """As it was edited last."""
        return self._context.record.recipe.evaluation.every

    async def open(self, step: int) -> None:
        """Start at rollout step `step`, or continue after an earlier sampler of this run.

        The evaluations that it had started come first. Of those that became due since, only the newest is run.
        """
        recorded = {(record.set, record.name) for record in await self._context.event_log.evaluations()}
        members = await self._context.redis.smembers(self._context.keys.lane(Lane.EVALUATION).pending)
        started = {member.decode().split(".")[2] for member in members}
        # The evaluator returns at once from an evaluation that has all its records.
        self._first = deque(name for name in sorted({BEFORE, *started}) if name != AFTER)
        self._known = step
        missed = due_steps(self._every, self._total, self._context.record.edited_after(EVERY), step)
        newest = f"{STEP}{missed[-1]}" if missed else BEFORE
        missing = {(name, newest) for name in self._context.record.recipe.evaluated_sets} - recorded
        if missing and newest not in self._first:
            self._waiting = newest

    async def tick(self, step: int) -> None:
        """Start the evaluation that is due at rollout step `step`. Raises a finished one's error. Call it often."""
        await self._note_due(step)
        if self._running is not None:
            if not self._running.done():
                return
            self._running.result()
        self._running = self._next()

    async def _note_due(self, step: int) -> None:
        for due in due_steps(self._every, self._total, self._known, step):
            await self._skip_waiting(f"{STEP}{due} became due")
            self._waiting = f"{STEP}{due}"
        self._known = max(self._known, step)

    def _next(self) -> asyncio.Task[bool] | None:
        name = self._first.popleft() if self._first else self._waiting
        if name is None:
            return None
        if name == self._waiting:
            self._waiting = None
        evaluation = self._evaluator.run(name, beside_training=name != BEFORE)
        return asyncio.create_task(evaluation, name=f"evaluation {name}")

    async def finish(self, step: int) -> bool:
        """Wait for the current evaluation, then evaluate `step`, the last. False if stopped."""
        await self._note_due(step)
        await self._skip_waiting("training finished; the last policy version is evaluated instead")
        self._running = self._running or self._next()
        while self._running is not None:
            if not await self._running:
                return False
            self._running = self._next()
        return await self._evaluator.run(AFTER)

    async def _skip_waiting(self, when: str) -> None:
        if self._waiting is not None:
            skipped, self._waiting = self._waiting, None
            await self._context.event_log.write("evaluation-skipped", f"{skipped}: had not started when {when}")

    async def close(self) -> None:
        """Cancel the current evaluation; the next sampler resumes it."""
        if self._running is not None:
            await cancel_and_wait(self._running)
