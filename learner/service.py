"""Owns the learner's life: batches in, policy versions out, from the initial weights to the export.

Reads the batches' stream and, at the end, the evaluations; writes step records, the weight plans, the run's archive
and checkpoints, the export. Rank 0 leads: it alone reads the stream, publishes and commits; the others follow its
commands. When a rank dies the run cannot go on, for its optimizer state is lost: the others notice by the process group
and fail too. A batch that was not committed stays unacked, and no group is counted as trained.

Drain order: finish or abandon the micro-batch under way -> tell the other ranks to stop -> stop serving joiners ->
destroy the engine and the process group.

Must not touch the policy; a rank's work does, and only the trainer imports DeepSpeed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from learner.export import export, export_folder, tokenizer_of
from learner.snapshot import Snapshot
from learner.trainer import Trained
from learner.weights import Publisher
from learner.work import Command, NonFiniteGradientError, RankWork
from services.contracts import AFTER, Batch, EvaluationRecord, StepRecord
from services.metrics import POLICY_VERSION, SKIPPED_OPTIMIZER_STEPS, STEP
from services.shell import Context
from services.streams.effects import Effects
from services.streams.leases import Consumer, Delivery
from services.streams.records import RunRecords

log = logging.getLogger(__name__)

R = TypeVar("R")

TICK_S = 4.0
"""Seconds within which rank 0 sends the other ranks a command, be it an idle one."""
POLL_S = 1.0


class LearnerService:
    """One rank of a run's learner. Ranks above 0 need rank 0's address, and `master_port` free there."""

    name = "learner"

    def __init__(self, rank: int = 0, world: int = 1, master_host: str = "127.0.0.1", master_port: int = 0) -> None:
        self._rank = rank
        self._world = world
        self._master = (master_host, master_port)
        self._version = 0
        self._trained_last = False

    async def run(self, context: Context) -> None:
        """Train until the run's rollout steps are done, then serve joiners until `stopping`. See the drain order."""
        self._context = context
        self._work = RankWork(context, self._rank, self._world, self._master)
        await context.presence.update(state="starting")
        try:
            await context.journal.event("starting", f"rank {self._rank} of {self._world} loads the policy")
            await self._work.open()
            await (self._lead() if self._rank == 0 else self._follow())
        finally:
            await self._work.close()

    async def _lead(self) -> None:
        context, recipe = self._context, self._context.record.recipe
        committed = await context.journal.policy_version()
        if committed:
            raise RuntimeError(
                f"run {context.record.id!r} is at policy version {committed}, whose weights died with its learner; "
                "submit it anew"
            )
        await self._work.begin_archive()
        self._effects = await Effects.fenced(context.redis, context.keys, self.name)
        self._publisher = Publisher(
            context.redis, context.keys, context.journal, recipe.weights, context.host, self._effects.epoch
        )
        self._consumer: Consumer[Batch] = Consumer(
            context.redis, context.keys, context.keys.batches, "learner", context.presence.info.id, Batch,
            recipe.limits.lease_s, recipe.limits.max_deliveries,
        )  # fmt: skip
        await self._consumer.open()
        await self._publisher.open(self._work.manifest)
        try:
            await self._publish(await self._snapshot(0))
            await context.presence.update(state="ready", version=0)
            await context.journal.event("ready", "learner ready; policy version 0 is served")
            await self._train_all()
            await self._finish()
            # After a failure nothing is sent: another rank may be inside a different collective. It notices us leave.
            await self._work.send(Command(do="stop"))
        finally:
            await self._publisher.close()

    async def _train_all(self) -> None:
        while not self._trained_last and not self._context.stopping.is_set():
            self._publisher.check()
            deliveries = await self._consumer.read(1, TICK_S if self._world > 1 else 1.0)
            if not deliveries:
                await self._work.send(Command(do="idle"))
            for delivery in deliveries:
                await self._handle(delivery)

    async def _handle(self, delivery: Delivery[Batch]) -> None:
        batch = delivery.message
        if batch.version < self._version:
            log.warning("step %d was trained before; its batch is acked without work", batch.step)
            await self._consumer.ack(delivery.lease)
            return
        if batch.version > self._version:
            raise RuntimeError(
                f"batch {batch.step} is for policy version {batch.version}, but {self._version} is current"
            )
        async with self._consumer.renewing(delivery.lease):
            started_at = time.time()
            await self._work.send(Command(do="train", batch=batch))
            trained = await self._work.train(batch)
            if trained is None:
                return
            record = _record(batch, trained, started_at)
            await self._check_gradients(record, trained)
            seconds = await self._publish(await self._snapshot(record.version))
            record = record.model_copy(update={"metrics": record.metrics | {"publish_seconds": seconds}})
            await self._effects.commit_step(delivery.lease, batch, record)
        self._trained_last = batch.last or record.version >= self._context.record.recipe.limits.rollout_steps
        await self._committed(record)

    async def _check_gradients(self, record: StepRecord, trained: Trained) -> None:
        """Report skipped optimizer steps. Raises NonFiniteGradientError after keeping the record as a failure."""
        if not trained.skipped:
            return
        SKIPPED_OPTIMIZER_STEPS.labels(run=self._context.record.id).inc(trained.skipped)
        await self._context.journal.event(
            "non-finite-gradient",
            f"step {record.step}: {trained.skipped} of {len(trained.optimizer)} optimizer steps skipped, their "
            f"gradient was not finite; {self._work.non_finite_in_a_row} in a row by now",
        )
        try:
            self._work.check_gradients(record.step)
        except NonFiniteGradientError:
            failed = record.model_copy(update={"version": self._version})
            await asyncio.to_thread(self._work.archive.write_failure, failed)
            raise

    async def _committed(self, record: StepRecord) -> None:
        self._version = record.version
        await self._context.presence.update(version=record.version)
        for name, value in record.metrics.items():
            STEP.labels(run=self._context.record.id, name=name).set(value)
        await asyncio.to_thread(self._work.archive.write_record, record)
        if self._work.due(record.step):
            await self._work.send(Command(do="save", step=record.step))
            await self._work.save(record.step)
            await self._meanwhile_idle(self._work.commit_checkpoint(record.step, record.version))
            await self._context.journal.event("checkpoint", f"policy version {record.version}, step {record.step}")

    async def _snapshot(self, version: int) -> Snapshot:
        snapshot = await self._work.snapshot(version)
        assert snapshot is not None, "rank 0 keeps it"
        self._last = snapshot
        return snapshot

    async def _publish(self, snapshot: Snapshot) -> float:
        seconds = await self._meanwhile_idle(self._publisher.publish(snapshot))
        POLICY_VERSION.labels(run=self._context.record.id, service=self.name).set(snapshot.version)
        return seconds

    async def _meanwhile_idle(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of rank 0's own `work`, while the other ranks hear that it lives."""
        task = asyncio.create_task(work)
        while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
            await self._work.send(Command(do="idle"))
        return task.result()

    async def _finish(self) -> None:
        """Export what was evaluated last. Until then and after, serve joiners: evaluation needs replicas.

        The wait for the last evaluations ends with `stopping`, which the controller sets once nothing has happened for
        limits.stall_timeout_s.
        """
        if not self._context.stopping.is_set():
            sets = ", ".join(self._context.record.recipe.evaluated_sets)
            await self._context.journal.event("awaiting-evaluation", f"export waits for {AFTER!r} of {sets}")
        exported = False
        while not self._context.stopping.is_set():
            evaluations = [] if exported else await self._final_evaluations()
            if evaluations:
                await self._export(evaluations)
                exported = True
            try:
                await asyncio.wait_for(self._context.stopping.wait(), TICK_S if exported else POLL_S)
            except TimeoutError:
                self._publisher.check()
                await self._work.send(Command(do="idle"))

    async def _final_evaluations(self) -> list[EvaluationRecord]:
        """The evaluation of the last version on every set; empty until all are there."""
        found = {one.set: one for one in await self._context.journal.evaluations() if one.name == AFTER}
        wanted = self._context.record.recipe.evaluated_sets
        return [found[name] for name in wanted] if found.keys() >= set(wanted) else []

    async def _export(self, evaluations: list[EvaluationRecord]) -> None:
        run = self._context.record.id
        source, template = Path(str(self._context.record.model_path)), self._context.record.recipe.model.chat_template
        tokenizer = tokenizer_of(source, template)
        folder = await self._work.in_order(
            lambda: export(self._work.causal_lm, self._last, tokenizer, export_folder(run), evaluations)
        )
        await RunRecords(self._context.redis).set_paths(run, export_path=str(folder))
        await self._context.journal.event("exported", f"policy version {self._version} is in {folder}")

    async def _follow(self) -> None:
        await self._work.snapshot(0)
        await self._context.presence.update(state="ready", version=0)
        while (command := await self._work.receive()).do != "stop":
            if command.batch is not None:
                await self._follow_batch(command.batch)
            if command.do == "save" and command.step is not None:
                await self._work.save(command.step)

    async def _follow_batch(self, batch: Batch) -> None:
        if await self._work.train(batch) is None:
            return
        self._work.check_gradients(batch.step)
        self._version = batch.version + 1
        await self._work.snapshot(self._version)
        await self._context.presence.update(version=self._version)


def _record(batch: Batch, trained: Trained, started_at: float) -> StepRecord:
    return StepRecord(
        step=batch.step, version=batch.version + 1, optimizer_steps=trained.optimizer_steps,
        groups=tuple(group.group for group in batch.groups), metrics=batch.sampling_metrics | trained.metrics,
        optimizer=trained.optimizer, generation_started_at=batch.generation_started_at,
        generation_finished_at=batch.generation_finished_at, learning_started_at=started_at,
        learning_finished_at=time.time(),
    )  # fmt: skip
