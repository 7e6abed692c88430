"""Owns the sampler's process: loading the data, becoming the owner of the role, the order of its parts.

Must not touch a group; the queue does, and the evaluator.

Reads verdicts and dead letters; writes tasks, batches, evaluations. When it dies, its successor raises the epoch
and rebuilds the ledger from Redis; verdicts that were not recorded are delivered again.
Drain order: stop reading, finish the call under way, leave; nothing needs to be handed over.
"""

from __future__ import annotations

import asyncio
import logging

from services.cancellation import cancel_and_wait
from services.contracts import ALONE
from services.process import Context
from services.sampler.data import load_splits
from services.sampler.evaluation.evaluator import Evaluator, held_out_sets, load_held_out
from services.sampler.evaluation.schedule import Timetable
from services.sampler.queue.maintenance import Housekeeping
from services.sampler.queue.queue import SamplingQueue
from services.sampler.rewind import resume
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import committed_step

log = logging.getLogger(__name__)


class SamplerService:
    """The dynamic-sampling queue of one run."""

    name = "sampler"

    async def run(self, context: Context) -> None:
        """Sample until the last rollout step is trained, and evaluate as the timetable says; then wait to be stopped.

        A run of no rollout steps is evaluated once.
        """
        housekeeping = Housekeeping(context)
        works = (
            self._train(context, housekeeping)
            if context.record.recipe.limits.rollout_steps
            else self._evaluate(context)
        )
        working, keeping = asyncio.create_task(works), asyncio.create_task(housekeeping.run(), name="housekeeping")
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, keeping):
                if task.done():
                    task.result()
            await context.stopping.wait()
        finally:
            await cancel_and_wait(working, keeping)

    async def _evaluate(self, context: Context) -> None:
        recipe = context.record.recipe
        with context.waits.on("data", "held-out prompts to be read", recipe.limits.startup_timeout_s):
            sets = await asyncio.to_thread(load_held_out, recipe)
        transitions = await GroupTransitions.fenced(context.redis, context.keys, self.name)
        await context.heartbeat.update(state="ready")
        await Evaluator(context, transitions, sets).run(ALONE)

    async def _train(self, context: Context, housekeeping: Housekeeping) -> None:
        recipe = context.record.recipe
        # In a thread: reading a big file must not stop this process's sign of life.
        with context.waits.on("data", "prompts to be read and filtered", recipe.limits.startup_timeout_s):
            splits = await asyncio.to_thread(load_splits, recipe.data, recipe.evaluation.sets)
        await context.event_log.write("data-loaded", splits.report.text)
        transitions = await GroupTransitions.fenced(context.redis, context.keys, self.name)
        await resume(context, transitions, splits.train)
        evaluator = Evaluator(context, transitions, held_out_sets(recipe, splits.held_out, splits.sets))
        queue = await SamplingQueue.open(context, transitions, splits, housekeeping)
        timetable = Timetable(context, evaluator)
        await timetable.open(await committed_step(context.redis, context.keys))
        await context.heartbeat.update(state="ready")
        try:
            await queue.run(timetable)
            if not context.stopping.is_set():
                await timetable.finish(queue.last_step)
        finally:
            await timetable.close()
