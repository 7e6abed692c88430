"""Owns the sampler's loop: take in verdicts, release or keep groups, publish batches, dispatch prompts.

Must not hold a rule of its own: what is kept, what is stale and how many go out is decided in credit and pacing.

Reads verdicts and dead letters; writes tasks, batches, evaluations. When it dies, its successor raises the epoch
and rebuilds the ledger from Redis; verdicts that were not recorded are delivered again.
Drain order: stop reading, finish the call under way, leave; nothing needs to be handed over.
"""

from __future__ import annotations

import asyncio
import logging

from services.cancellation import end
from services.contracts import Lane, Release, SamplerState, Sampling, Task, Verdict
from services.metrics import GROUPS
from services.sampler.batching import Window, make_batch
from services.sampler.credit.filtering import KEPT, decide
from services.sampler.evaluation import Evaluator
from services.sampler.ledger import Ledger, recover
from services.sampler.pacing import SurvivalEstimate, groups_to_dispatch, slots, staleness
from services.sampler.progress import Progress
from services.sampler.prompts import PromptCursor, Splits, load_splits
from services.shell import Context
from services.streams.effects import Effects, group_counts
from services.streams.leases import Consumer, Delivery

log = logging.getLogger(__name__)


class SamplerService:
    """The dynamic-sampling queue of one run."""

    name = "sampler"

    async def run(self, context: Context) -> None:
        """Evaluate, sample until the last policy version is out, evaluate again; then wait to be stopped."""
        splits = load_splits(context.record.recipe.data)
        effects = await Effects.fenced(context.redis, context.keys, self.name)
        progress = Progress(context)
        evaluator = Evaluator(context, effects, splits.held_out, progress)
        await context.presence.update(state="ready")
        queue = await SamplingQueue.open(context, effects, splits, progress)
        before = asyncio.create_task(evaluator.run("before"), name="evaluation before training")
        try:
            await queue.run(before)
            if await before and not context.stopping.is_set():
                await context.journal.event("evaluating", "held-out evaluation of the last policy version")
                await evaluator.run("after")
        finally:
            await end(before)
        await context.stopping.wait()


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
        self._cursor = PromptCursor(splits.train, self._recipe.seed, state.cursor)
        self._next_group = state.next_group
        self._next_step = 1
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
        await queue._verdicts.open()
        return queue

    async def run(self, before: asyncio.Task[object]) -> None:
        """Sample until the last version is published; raises what `before`, the first evaluation, raises."""
        total = self._recipe.limits.rollout_steps
        while not self._context.stopping.is_set():
            if before.done() and before.exception():
                raise RuntimeError(f"the evaluation before training failed: {before.exception()}")
            version = await self._context.journal.policy_version() or 0
            if version >= total:
                return
            self._ledger.published(version)
            await self._publish_batches(version)
            await self._dispatch(total - version)
            for delivery in await self._verdicts.read(256, 0.25):
                await self._take_in(delivery)
            await self._bury_dead()
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
        """A task or sample that was given up ends its group: the run goes on without it."""
        for entry, letter in await self._context.journal.dead_letters(self._dead_after):
            self._dead_after = entry
            if letter.group in self._ledger.generating:
                await self._release(letter.group, Release.DEAD)
                del self._ledger.generating[letter.group]
                await self._context.journal.event("group-dead", f"{letter.group}: {letter.reason}")

    async def _publish_batches(self, version: int) -> None:
        """Publish every batch whose policy may consume it now without exceeding the staleness bound."""
        limits = self._recipe.limits
        while self._next_step <= limits.rollout_steps:
            consuming = self._next_step - 1
            if consuming > version + limits.max_staleness:
                return
            await self._drop_stale(consuming)
            if len(self._ledger.kept) < limits.groups_per_step:
                return
            names = list(self._ledger.kept)[: limits.groups_per_step]
            state = SamplerState(cursor=self._cursor.position, next_group=self._next_group)
            groups = {name: self._ledger.kept[name] for name in names}
            batch = make_batch(self._recipe, self._next_step, consuming, groups, state, self._window.metrics())
            if not await self._effects.publish_batch(batch):
                raise RuntimeError(f"batch {self._next_step} holds a group that is no longer kept")
            self._ledger.batch_out(consuming, names)
            self._window = Window(self._recipe)
            self._next_step += 1

    async def _drop_stale(self, consuming: int) -> None:
        for name, group in list(self._ledger.kept.items()):
            if staleness(consuming, group.oldest_version) > self._recipe.limits.max_staleness:
                await self._release(name, Release.STALE)
                del self._ledger.kept[name]

    async def _release(self, name: str, release: Release) -> None:
        self._window.released(release)
        await self._effects.release(Lane.TRAIN, name, release, self._recipe.algorithm.group_size)

    async def _dispatch(self, steps_left: int) -> None:
        limits = self._recipe.limits
        wanted = slots(limits.groups_per_step, limits.max_staleness, steps_left)
        flow = self._ledger.flow(self._survival.value)
        for _ in range(groups_to_dispatch(flow, wanted, limits.max_inflight_groups)):
            rollout = self._recipe.rollout
            sampling = Sampling(
                temperature=rollout.temperature, top_p=rollout.top_p, max_new_tokens=rollout.max_new_tokens
            )
            name = f"g{self._next_group:08d}"
            task = Task(
                group=name, prompt=self._cursor.next(), samples=self._recipe.algorithm.group_size, sampling=sampling
            )
            self._next_group += 1
            state = SamplerState(cursor=self._cursor.position, next_group=self._next_group)
            await self._effects.dispatch(Lane.TRAIN, task, state)
            self._ledger.dispatched(task)

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
