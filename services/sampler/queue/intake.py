"""Owns the intake of verdicts: it reads and records them, and decides whether a judged group is kept or released.

Must not hold a rule of its own: `filtering` and `screening` decide what is kept.
"""

from __future__ import annotations

import asyncio
import logging

from services.contracts import UNJUDGEABLE, CommittedPolicy, Lane, Task, Verdict, VerdictResult
from services.metrics import MESSAGES
from services.sampler.advantage.filtering import KEPT, FilterRule, decide
from services.sampler.groups import Group, GroupVerdicts, recall, verdicts_by_group
from services.sampler.queue.state import QueueState
from services.sampler.queue.unknowns import GROUPS_IN_A_ROW
from services.sampler.queue.waits import VERDICTS
from services.sampler.selection.screening import COMPLETE, screen
from services.streams.delivery.consumer import Consumer
from services.streams.state.group_state import MORE, dead_letter_rejected

log = logging.getLogger(__name__)

READ_COUNT = 1024
"""A turn of the loop has several round trips, so a small read would limit the rate where Redis is far away."""


class VerdictIntake:
    """The consumer of the training lane's verdicts."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._policy = CommittedPolicy(version=0, step=0)
        self._sampling = state.recipe.algorithm.dynamic_sampling
        self._rule = FilterRule(state.recipe.algorithm.filter, self._sampling.min_spread)
        self._unjudgeable: dict[str, str] = {}
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

    async def read(self, policy: CommittedPolicy) -> None:
        """Wait up to 0.25 s for verdicts, and record up to READ_COUNT of them, together, under the committed policy."""
        self._policy = policy
        deliveries = await self._verdicts.read(READ_COUNT, 0.25)
        state = self._state
        if deliveries:
            state.context.waits.done(VERDICTS)
            names = state.table.unknown(dict.fromkeys(delivery.message.group for delivery in deliveries))
            await recall(state.context.redis, state.context.keys, state.table, names)
        # All decide before they are sent, and they are sent in the order of their decisions.
        found = verdicts_by_group(deliveries, self._judge) + self._decide_again()
        await self._drop_unjudgeable()
        await asyncio.gather(*(self._record(verdicts) for verdicts in found))

    async def _drop_unjudgeable(self) -> None:
        """Remember the prompts that no verifier can judge: this sampler and its successors never draw them again."""
        state, prompts = self._state, self._unjudgeable
        for prompt, reason in prompts.items():
            if not await state.context.redis.hsetnx(state.context.keys.dropped, prompt, UNJUDGEABLE):
                continue  # it was drawn so often before it was dropped
            text = (
                f"prompt {prompt!r}: {GROUPS_IN_A_ROW} groups in a row have no known verdict; the last reason: {reason}"
            )
            log.warning("never drawn again: %s", text)
            await state.context.event_log.write(f"prompt-{UNJUDGEABLE}", f"never drawn again: {text}")
        prompts.clear()

    def _judge(self, verdicts: GroupVerdicts, verdict: Verdict) -> None:
        """Add a verdict to its group, and set the decision that it leads to.

        The table changes first: Redis changes in the same way, or `_record` raises, and a restarted sampler reads it
        again.
        """
        group = self._state.table.generating.get(verdict.group)
        if group is None or verdict.index >= group.task.samples:
            return
        if verdict.index not in group.verdicts:
            group.verdicts[verdict.index] = verdict
            self._state.unknown_share.judged(verdict)
        self._state.newest_version = max(self._state.newest_version, verdict.facts.newest_version)
        self._settle(verdicts, group)

    def _decide_again(self) -> list[GroupVerdicts]:
        """Decisions on the groups whose verdicts Redis has, while it lost the decision on them in a failover."""
        table = self._state.table
        found = []
        for name in list(table.undecided):
            group = table.generating[name]
            if group.judged:
                verdicts = GroupVerdicts(name)
                self._settle(verdicts, group)
                log.warning("group %s has all its verdicts, but no decision; it is %s", name, verdicts.decision)
                found.append(verdicts)
        table.undecided.clear()
        return found

    def _settle(self, verdicts: GroupVerdicts, group: Group) -> None:
        """Set the decision on a group, '' while verdicts are missing, and apply it to the table."""
        verdicts.decision, verdicts.rest = self._decide(group)
        verdicts.posterior = self._update_pass_rate(group, verdicts.decision)
        if verdicts.decision:
            self._apply(verdicts.group, group, verdicts.decision, verdicts.rest)

    async def _record(self, verdicts: GroupVerdicts) -> None:
        """Record verdicts of one group; dead-letter those that are not of this run."""
        state = self._state
        effects = await state.transitions.record_verdicts(
            Lane.TRAIN,
            verdicts.group,
            verdicts.leased,
            verdicts.decision,
            rest=verdicts.rest,
            posterior=verdicts.posterior,
        )
        if verdicts.decision and effects and effects[-1] < 0:
            raise RuntimeError(f"Redis lost group {verdicts.group!r}, which was being judged")
        refused = await dead_letter_rejected(self._verdicts, verdicts.deliveries, effects)
        recorded = len(effects) - refused
        state.verdicts += recorded
        for count, result in ((recorded, VerdictResult.RECORDED), (refused, VerdictResult.REFUSED)):
            MESSAGES.labels(state.context.keys.run, "train-verdicts", result).inc(count)

    def _decide(self, group: Group) -> tuple[str, Task | None]:
        """The decision on a group, '' while verdicts are missing; with MORE, the task for its other samples too."""
        if not group.judged:
            return "", None
        min_known = self._sampling.min_known or group.task.samples
        if group.task.stop is None:
            return decide(group.outcomes, min_known, self._sampling.enabled, group.scores, self._rule), None
        screened = screen(group.outcomes, group.task.samples, min_known, group.scores, self._rule)
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
        step = self._policy.step_of(group.oldest_version)
        rates.observe(prompt, sum(outcome == "correct" for outcome in known), len(known), step)
        return prompt, rates.entry(prompt)

    def _apply(self, name: str, group: Group, decision: str, rest: Task | None) -> None:
        """Update the queue's state for a decision."""
        if rest is not None:
            group.task = rest
            return
        self._state.window.judged(group, decision)
        self._state.survival.observe(decision == KEPT)
        self._state.starvation.group_judged()
        self._watch_prompt(group)
        if decision == KEPT:
            self._state.table.keep(name)
        else:
            self._state.table.remove(name)

    def _watch_prompt(self, group: Group) -> None:
        """Drop the group's prompt if it is unjudgeable, unless the judging as a whole fails: then the run pauses."""
        state = self._state
        if state.unknown_share.excess is not None:
            return
        if (reason := state.unjudged.judged(group)) is not None:
            state.dispatcher.drop({group.task.prompt.id: UNJUDGEABLE})
            self._unjudgeable[group.task.prompt.id] = reason
