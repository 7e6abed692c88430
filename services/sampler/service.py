"""Owns the sampler's loop: take in verdicts, release or keep groups, publish batches, dispatch prompts.

Must not hold a rule of its own: what is kept, what is stale and how many go out is decided in credit and pacing.

Reads verdicts and dead letters; writes tasks, batches, evaluations. When it dies, its successor raises the epoch
and rebuilds the ledger from Redis; verdicts that were not recorded are delivered again.
Drain order: stop reading, finish the call under way, leave; nothing needs to be handed over.
"""

from __future__ import annotations

import asyncio
import logging

from services.contracts import ALONE, Lane, Release, SamplerState, Verdict
from services.metrics import GROUPS
from services.sampler.batching import Window, make_batch
from services.sampler.credit.filtering import KEPT, decide
from services.sampler.data import Splits, load_splits
from services.sampler.dispatch import PROMPT_FAULTS, Dispatcher
from services.sampler.evaluation import Evaluator, held_out_sets, load_held_out
from services.sampler.ledger import Ledger, recover
from services.sampler.pacing import SurvivalEstimate, staleness
from services.sampler.progress import Progress
from services.sampler.timetable import Timetable
from services.shell import Context
from services.streams.effects import Effects, group_counts, response_tokens
from services.streams.leases import Consumer, Delivery

log = logging.getLogger(__name__)


class SamplerService:
    """The dynamic-sampling queue of one run."""

    name = "sampler"

    async def run(self, context: Context) -> None:
        """Sample until the last policy version is out, and evaluate as the timetable says; then wait to be stopped.

        A run of no rollout steps is evaluated once.
        """
        if context.record.recipe.limits.rollout_steps == 0:
            await self._evaluate(context)
        else:
            await self._train(context)
        await context.stopping.wait()

    async def _evaluate(self, context: Context) -> None:
        recipe = context.record.recipe
        sets = await asyncio.to_thread(load_held_out, recipe)
        effects = await Effects.fenced(context.redis, context.keys, self.name)
        await context.presence.update(state="ready")
        await Evaluator(context, effects, sets, Progress(context)).run(ALONE)

    async def _train(self, context: Context) -> None:
        recipe = context.record.recipe
        # In a thread: reading a big file must not stop this process's sign of life.
        splits = await asyncio.to_thread(load_splits, recipe.data, recipe.evaluation.sets)
        await context.journal.event("data-loaded", splits.report.text)
        effects = await Effects.fenced(context.redis, context.keys, self.name)
        progress = Progress(context)
        evaluator = Evaluator(context, effects, held_out_sets(recipe, splits.held_out, splits.sets), progress)
        await context.presence.update(state="ready")
        queue = await SamplingQueue.open(context, effects, splits, progress)
        timetable = Timetable(context, evaluator)
        await timetable.open(await context.journal.policy_version() or 0)
        try:
            await queue.run(timetable)
            if not context.stopping.is_set():
                await timetable.finish(queue.last_step)
        finally:
            await timetable.close()


class SamplingQueue:
    """The training lane: dispatch with refill until the run's steps are done."""

    def __init__(
        self, context: Context, effects: Effects, splits: Splits, ledger: Ledger, state: SamplerState,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._progress = progress
        self._context = context
        self._recipe = context.record.recipe
        self._effects = effects
        self._ledger = ledger
        self._dispatcher = Dispatcher(context, effects, ledger, splits.train, state)
        self._next_step = 1
        self._last_step = self._recipe.limits.rollout_steps
        self._survival = SurvivalEstimate()
        self._window = Window(self._recipe)
        self._dead_after = "0-0"
        limits = self._recipe.limits
        self._verdicts = Consumer(
            context.redis, context.keys, context.keys.lane(Lane.TRAIN).verdicts, "sampler",
            context.presence.info.id, Verdict, limits.lease_s, limits.max_deliveries,
        )  # fmt: skip

    @classmethod
    async def open(cls, context: Context, effects: Effects, splits: Splits, progress: Progress) -> SamplingQueue:
        """Go on where an earlier sampler of this run stopped, or begin."""
        ledger, last = await recover(context.redis, context.keys, Lane.TRAIN)
        stored = await context.redis.get(context.keys.sampler_state)
        state = SamplerState.model_validate_json(stored) if stored else SamplerState(cursor=0, next_group=0)
        queue = cls(context, effects, splits, ledger, state, progress)
        queue._next_step = last.step + 1 if last else 1
        if last and last.last:
            queue._last_step = last.step
        await queue._verdicts.open()
        return queue

    @property
    def last_step(self) -> int:
        """The run's last rollout step, which is the last policy version; a spent budget brings it forward."""
        return self._last_step

    async def run(self, timetable: Timetable) -> None:
        """Sample until the last version is published, beside the evaluations; raises what one of them raises."""
        while not self._context.stopping.is_set():
            version = await self._context.journal.policy_version() or 0
            if version >= self._last_step:
                return
            await timetable.tick(version)
            self._ledger.published(version)
            await self._publish_batches(version)
            await self._bury_dead()
            await self._dispatcher.dispatch(self._last_step - version, self._survival.value, self._window)
            for delivery in await self._verdicts.read(256, 0.25):
                await self._take_in(delivery)
            await self._report()
            await self._check_progress()

    async def _take_in(self, delivery: Delivery[Verdict]) -> None:
        self._progress.heard()
        verdict = delivery.message
        group = self._ledger.generating.get(verdict.group)
        decision = ""
        if group is not None:
            group.verdicts[verdict.index] = verdict
            if group.judged:
                rule = self._recipe.algorithm.dynamic_sampling
                decision = decide(group.outcomes, rule.min_known or group.task.samples, rule.enabled)
        samples = self._recipe.algorithm.group_size
        await self._effects.record_verdict(Lane.TRAIN, delivery.lease, verdict, decision, samples)
        if group is None or not decision:
            return
        self._window.judged(group, decision)
        self._survival.observe(decision == KEPT)
        if decision == KEPT:
            self._progress.kept()
            self._ledger.keep(verdict.group)
        else:
            del self._ledger.generating[verdict.group]

    async def _bury_dead(self) -> None:
        """A task or sample that was given up ends its group, and its prompt where that is at fault: the run goes on.

        Letters are read from the first one, so that a new sampler knows the dropped prompts before it draws any.
        """
        for entry, letter in await self._context.journal.dead_letters(self._dead_after):
            self._dead_after = entry
            news = self._dispatcher.drop(letter)
            if letter.group not in self._ledger.generating:
                continue
            if news:
                await self._context.journal.event(f"prompt-{letter.cause.value}", f"never drawn again: {letter.reason}")
            elif letter.cause not in PROMPT_FAULTS:
                await self._context.journal.event("group-dead", f"{letter.group}: {letter.reason}")
            await self._release(letter.group, Release.DEAD)
            del self._ledger.generating[letter.group]

    async def _publish_batches(self, version: int) -> None:
        """Publish every batch whose policy may consume it now without exceeding the staleness bound."""
        limits = self._recipe.limits
        while self._next_step <= self._last_step:
            consuming = self._next_step - 1
            if consuming > version + limits.max_staleness:
                return
            await self._drop_stale(consuming)
            if len(self._ledger.kept) < limits.groups_per_step:
                return
            names = list(self._ledger.kept)[: limits.groups_per_step]
            groups = {name: self._ledger.kept[name] for name in names}
            metrics = self._window.metrics() | self._dispatcher.metrics
            self._dispatcher.batch_out()
            if await self._budget_spent():
                self._last_step = self._next_step
            batch = make_batch(
                self._recipe, self._next_step, consuming, groups, self._dispatcher.state, metrics,
                last=self._next_step == self._last_step,
            )  # fmt: skip
            if not await self._effects.publish_batch(batch):
                raise RuntimeError(f"batch {self._next_step} holds a group that is no longer kept")
            self._ledger.batch_out(consuming, names)
            self._window = Window(self._recipe)
            self._next_step += 1

    async def _budget_spent(self) -> bool:
        budget = self._recipe.limits.response_tokens
        return budget is not None and await response_tokens(self._context.redis, self._context.keys) >= budget

    async def _drop_stale(self, consuming: int) -> None:
        for name, group in list(self._ledger.kept.items()):
            if staleness(consuming, group.oldest_version) > self._recipe.limits.max_staleness:
                await self._release(name, Release.STALE)
                del self._ledger.kept[name]

    async def _release(self, name: str, release: Release) -> None:
        self._window.released(release)
        await self._effects.release(Lane.TRAIN, name, release, self._recipe.algorithm.group_size)

    async def _report(self) -> None:
        counts = await group_counts(self._context.redis, self._context.keys)
        for state, value in counts.model_dump().items():
            GROUPS.labels(self._context.keys.run, state).set(value)

    async def _check_progress(self) -> None:
        generating = self._ledger.generating
        if not generating:  # nothing is wanted of anybody
            self._progress.heard()
            self._progress.kept()
        oldest = f", the oldest {min(generating)}" if generating else ""
        await self._progress.check(f"{len(generating)} groups{oldest}")
