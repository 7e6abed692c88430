"""Owns how rank 0 ends a run: wait for the final evaluation, export the policy, serve joining replicas until stopped.

Must not train, nor publish a new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from learner.coordinator.publication import Publication
from learner.coordinator.waiting import POLL_S, TICK_S, idle_during
from learner.model.export import export, export_folder, stored, tokenizer_of
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.storage_retry import retry_storage
from services.contracts import AFTER, EvaluationRecord
from services.process.hosting import Context
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.runs import RunRecords


class RunEnd:
    """The end of rank 0, after the last rollout step."""

    def __init__(
        self,
        context: Context,
        worker: RankWorker,
        publication: Publication,
        save_last: Callable[[], Awaitable[None]],
    ) -> None:
        """`save_last`: writes the checkpoint that is owed; see TrainingLoop."""
        self._context = context
        self._recipe = context.record.recipe
        self._worker = worker
        self._publication = publication
        self._save_last = save_last

    async def run(self) -> None:
        """Export once every evaluated set has its final evaluation, then return when a rank is asked to stop.

        Before the export, the checkpoint that is owed is written then: the last steps are in none, because only the
        export follows them.

        The publisher serves joining replicas all this time, because the evaluation needs replicas.
        """
        context, patience_s = self._context, self._recipe.limits.stall_timeout_s
        exported = (await RunRecords(context.redis).get(context.record.id)).export_path is not None
        sets = ", ".join(self._recipe.evaluated_sets)
        if not exported and not self._worker.stopping:
            text = f"the export waits for the evaluation {AFTER!r} of {sets}"
            await context.event_log.write("awaiting-evaluation", text)
        while not self._worker.stopping:
            if exported:
                context.waits.done("evaluations")
            else:
                context.waits.pending("evaluations", f"the evaluation {AFTER!r} of {sets}", patience_s, idle=True)
                if evaluations := await self._final_evaluations():
                    await self._export(evaluations)
                    exported = True
            try:
                await asyncio.wait_for(context.stopping.wait(), TICK_S if exported else POLL_S)
            except TimeoutError:
                self._publication.check()
                await self._worker.send(Command(do="idle"))
        if not exported:
            await self._save_last()

    async def _final_evaluations(self) -> list[EvaluationRecord]:
        """The evaluations of the last version, one per evaluated set; empty until all of them exist."""
        evaluations = await self._context.event_log.evaluations()
        found = {evaluation.set: evaluation for evaluation in evaluations if evaluation.name == AFTER}
        wanted = self._recipe.evaluated_sets
        return [found[name] for name in wanted] if found.keys() >= set(wanted) else []

    async def _export(self, evaluations: list[EvaluationRecord]) -> None:
        context, worker, run = self._context, self._worker, self._context.record.id
        waits, patience_s = context.waits, self._recipe.limits.stall_timeout_s
        with waits.on("export", "the export to be written", patience_s):
            files = await read_reward_files(context.redis, context.record)
            read = partial(tokenizer_of, worker.model_folder, self._recipe.model.chat_template, files)
            tokenizer = await idle_during(worker, retry_storage(read, "the chat template", waits, patience_s))
            # Reads only the config and the parameter names of the model in training.
            snapshot, folder = self._publication.snapshot, export_folder(run)
            check = partial(self._check_owner, asyncio.get_running_loop())
            write = partial(export, worker.causal_lm, snapshot, tokenizer, folder, evaluations, check)
            written = await idle_during(worker, retry_storage(write, "the export", waits, patience_s))
            upload = partial(stored, written, run, check)
            place = await idle_during(worker, retry_storage(upload, "the export", waits, patience_s))
        await RunRecords(context.redis).set_paths(run, self._publication.history.fence, "learner", export_path=place)
        version = self._publication.policy.version
        await context.event_log.write("exported", f"policy version {version} is in {place}")

    def _check_owner(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise FencedError if this learner was replaced. For another thread than that of `loop`."""
        records, run = RunRecords(self._context.redis), self._context.record.id
        changes_nothing = records.set_paths(run, self._publication.history.fence, "learner")
        checked = asyncio.run_coroutine_threadsafe(changes_nothing, loop)
        checked.result(self._recipe.limits.stall_timeout_s)
