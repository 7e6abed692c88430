"""Owns the sampler's process: it loads the data, becomes the owner of the role and starts the queue and evaluations.

Must not read or change a group; the queue and the evaluator do.

Reads verdicts and dead letters; writes tasks, batches, evaluations. When it dies, its successor becomes the owner
of the role and rebuilds the group table from Redis; verdicts that were not recorded are delivered again.
Drain order: stop reading, finish the current call, archive the groups that have ended, exit; its successor archives the
rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import chain

from services.contracts import ALONE, Prompt
from services.process.hosting import Context, collect_garbage_rarely
from services.sampler.archive.archivist import Archivist
from services.sampler.data import RowRewards, load_splits, row_functions
from services.sampler.evaluation.evaluator import Evaluator, held_out_sets, load_held_out
from services.sampler.evaluation.schedule import EvaluationSchedule
from services.sampler.queue.maintenance import Maintenance
from services.sampler.queue.queue import SamplingQueue
from services.sampler.rewind import rewind_run
from services.streams.memory_plan import compare_loaded
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import committed_step
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.rewards.row_functions import write_row_functions
from services.waits import cancel_and_wait

log = logging.getLogger(__name__)


class SamplerService:
    """The dynamic-sampling queue of one run."""

    name = "sampler"

    async def run(self, context: Context) -> None:
        """Sample until the last rollout step is trained, and evaluate by the schedule; then wait for the stop.

        A run without rollout steps is evaluated once.
        """
        collect_garbage_rarely()
        maintenance = Maintenance(context)
        archivist = Archivist(context, maintenance.memory)
        work = asyncio.create_task(self._work(context, maintenance, archivist), name="sampling")
        beside = {"maintenance": maintenance.run(), "archive": archivist.run(), "merging": archivist.merge()}
        tasks = [work, *(asyncio.create_task(body, name=name) for name, body in beside.items())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancel_and_wait(*tasks)

    async def _work(self, context: Context, maintenance: Maintenance, archivist: Archivist) -> None:
        if context.record.recipe.limits.rollout_steps > 0:
            await self._train(context, maintenance, archivist)
        else:
            await self._evaluate(context, maintenance, archivist)
        await context.stopping.wait()
        await archivist.close()

    async def _evaluate(self, context: Context, maintenance: Maintenance, archivist: Archivist) -> None:
        recipe = context.record.pinned_recipe
        with context.waits.on("data", "the held-out prompts to be loaded", recipe.limits.startup_timeout_s):
            files = await read_reward_files(context.redis, context.record)
            sets, loaded = await asyncio.to_thread(load_held_out, recipe, files)
        await context.event_log.write("data-loaded", loaded)
        await _share_functions(context, (prompt for held_out in sets for prompt in held_out.prompts))
        prompts = {held_out.name: len(held_out.prompts) for held_out in sets}
        await compare_loaded(context.redis, recipe, recipe.data.train, prompts)
        transitions = await GroupTransitions.fenced(context.redis, context.keys, self.name, context.heartbeat.info.id)
        archivist.open(transitions)
        await context.heartbeat.update(state="ready")
        await Evaluator(context, transitions, sets, maintenance.memory, archivist.drain).run(ALONE)

    async def _train(self, context: Context, maintenance: Maintenance, archivist: Archivist) -> None:
        recipe = context.record.pinned_recipe
        # In a thread, because reading a big file must not delay this process's heartbeat.
        with context.waits.on("data", "the prompts to be loaded and filtered", recipe.limits.startup_timeout_s):
            rewards = RowRewards.of(recipe, await read_reward_files(context.redis, context.record))
            splits = await asyncio.to_thread(load_splits, recipe.data, recipe.evaluation.sets, rewards)
        await context.event_log.write("data-loaded", splits.report.text)
        await _share_functions(context, chain(splits.train, splits.held_out, *splits.sets.values()))
        # A run that has trained has shown that it fits: a restarted sampler must not end it by an upper bound.
        if await committed_step(context.redis, context.keys) == 0:
            await compare_loaded(context.redis, recipe, splits.report.train, splits.report.sets)
        transitions = await GroupTransitions.fenced(context.redis, context.keys, self.name, context.heartbeat.info.id)
        archivist.open(transitions)
        await rewind_run(context, transitions, splits.train, archivist.drain)
        sets = held_out_sets(recipe, splits.held_out, splits.sets)
        evaluator = Evaluator(context, transitions, sets, maintenance.memory, archivist.drain)
        queue = await SamplingQueue.open(context, transitions, splits, maintenance, archivist.room)
        schedule = EvaluationSchedule(context, evaluator)
        await schedule.open(await committed_step(context.redis, context.keys))
        await context.heartbeat.update(state="ready")
        try:
            await queue.run(schedule)
            if not context.stopping.is_set():
                await self._finish(queue, schedule)
        finally:
            await schedule.close()

    @staticmethod
    async def _finish(queue: SamplingQueue, schedule: EvaluationSchedule) -> None:
        """Run the last evaluations, to which the groups that were not trained give way when memory is short."""
        finishing = asyncio.create_task(schedule.finish(queue.last_step), name="last evaluations")
        yielding = asyncio.create_task(queue.yield_memory(), name="memory for the last evaluations")
        try:
            await asyncio.wait({finishing, yielding}, return_when=asyncio.FIRST_COMPLETED)
            for task in (finishing, yielding):
                if task.done():
                    task.result()
        finally:
            await cancel_and_wait(finishing, yielding)


async def _share_functions(context: Context, prompts: Iterable[Prompt]) -> None:
    """Write which functions of the user's the prompts name: verifiers load them before they are ready."""
    verifiers = (prompt.verifier for prompt in prompts)
    functions = await asyncio.to_thread(row_functions, context.record.recipe, verifiers)
    await write_row_functions(context.redis, context.keys, functions)
