"""Owns the intake of verdicts: it reads and records them, and decides whether a judged group is kept or released.

Must not hold a rule of its own: `filtering` and `screening` decide what is kept.
"""

from __future__ import annotations

import asyncio

from services.contracts import Cause, Lane, Task, Verdict, VerdictResult
from services.metrics import MESSAGES
from services.sampler.advantage.filtering import KEPT, decide
from services.sampler.groups import Group, recall
from services.sampler.queue.state import QueueState
from services.sampler.queue.waits import VERDICTS
from services.sampler.selection.screening import COMPLETE, screen
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.state.group_state import MORE, RejectedMessageError

READ_COUNT = 256


class VerdictIntake:
    """The consumer of the training lane's verdicts."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._sampling = state.recipe.algorithm.dynamic_sampling
        context, limits = state.context, state.recipe.limits
        self._verdicts = Consumer(
            context.redis,
            context.keys,
            context.keys.lane(Lane.TRAIN).verdicts,
            "sampler",
            context.heartbeat.info.id,
            Verdict,
            limits.lease_s,
            limits.max_deliveries,
        )

    async def open(self) -> None:
        """Create the consumer group."""
        await self._verdicts.open()

    async def read(self) -> None:
        """Wait up to 0.25 s for verdicts, and record up to READ_COUNT of them, together."""
        deliveries = await self._verdicts.read(READ_COUNT, 0.25)
        if not deliveries:
            return
        state = self._state
        state.context.waits.done(VERDICTS)
        names = state.table.unknown(dict.fromkeys(delivery.message.group for delivery in deliveries))
        await recall(state.context.redis, state.context.keys, state.table, names)
        # Each decides before it is sent, and they are sent in this order.
        await asyncio.gather(*(self._record(delivery) for delivery in deliveries))

    async def _record(self, delivery: Delivery[Verdict]) -> None:
        """Record a verdict together with the decision that it leads to; dead-letter one that is not of this run.

        The table changes first: Redis changes in the same way, or this raises, and a restarted sampler reads it again.
        """
        state, verdict = self._state, delivery.message
        group = state.table.generating.get(verdict.group)
        decision, rest, posterior = "", None, ("", "")
        if group is not None and verdict.index < group.task.samples:
            group.verdicts.setdefault(verdict.index, verdict)
            decision, rest = self._decide(group)
            posterior = self._update_pass_rate(group, decision)
            if decision:
                self._apply(verdict.group, group, decision, rest)
        run, size = state.context.keys.run, state.recipe.algorithm.group_size
        try:
            await state.transitions.record_verdict(
                Lane.TRAIN, delivery.lease, verdict, decision, size, rest=rest, posterior=posterior
            )
        except RejectedMessageError as error:
            if decision:
                raise RuntimeError(f"Redis lost a group that was being judged: {error}") from None
            await self._verdicts.dead_letter(delivery, str(error), Cause.INVALID)
            MESSAGES.labels(run, "train-verdicts", VerdictResult.REFUSED).inc()
            return
        state.verdicts += 1
        MESSAGES.labels(run, "train-verdicts", VerdictResult.RECORDED).inc()

    def _decide(self, group: Group) -> tuple[str, Task | None]:
        """The decision on a group, '' while verdicts are missing; with MORE, the task for its other samples too."""
        if not group.judged:
            return "", None
        min_known = self._sampling.min_known or group.task.samples
        if group.task.stop is None:
            return decide(group.outcomes, min_known, self._sampling.enabled), None
        screened = screen(group.outcomes, group.task.samples, min_known)
        if screened == COMPLETE:
            return MORE, group.task.model_copy(update={"stop": None})
        return screened, None

    def _update_pass_rate(self, group: Group, decision: str) -> tuple[str, str]:
        """Add a decided group to its prompt's pass rate. Returns (prompt id, stored value), or empty strings."""
        if decision in ("", MORE):
            return "", ""
        known = [outcome for outcome in group.outcomes if outcome != "unknown"]
        if not known:
            return "", ""
        prompt, rates = group.task.prompt.id, self._state.dispatcher.rates
        rates.observe(prompt, sum(outcome == "correct" for outcome in known), len(known), group.oldest_version)
        return prompt, rates.entry(prompt)

    def _apply(self, name: str, group: Group, decision: str, rest: Task | None) -> None:
        """Update the queue's state for a decision."""
        if rest is not None:
            group.task = rest
            return
        self._state.window.judged(group, decision)
        self._state.survival.observe(decision == KEPT)
        self._state.starvation.group_judged()
        if decision == KEPT:
            self._state.table.keep(name)
        else:
            self._state.table.remove(name)
