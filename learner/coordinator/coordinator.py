"""Owns rank 0's part: taking the run up where it stands, batches in, policy versions out, the export at the end.

Reads the log of batches and, at the end, the evaluations; writes step records, weight plans, the run's archive,
checkpoints and the export. It alone publishes and commits; the other ranks follow its commands.

Must not touch the policy; a rank's work does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from learner.coordinator.checkpoint_schedule import Checkpointing
from learner.model.export import export, export_folder, stored, tokenizer_of
from learner.rank.commands import Command
from learner.rank.worker import NonFiniteGradientError, RankWork
from learner.recovery.start import Recovery
from learner.storage_retry import written
from learner.training.trainer import Trained
from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import Snapshot
from services.contracts import (
    AFTER,
    Batch,
    CommittedPolicy,
    EvaluationRecord,
    GroupCounts,
    SamplerSnapshot,
    SamplerState,
    StepRecord,
)
from services.metric_tables import show_step
from services.metrics import DAMAGED_PAYLOADS, POLICY_VERSION, SKIPPED_OPTIMIZER_STEPS
from services.process import Context
from services.streams.state.policy_history import History, LoggedBatch
from services.streams.state.runs import RunRecords

log = logging.getLogger(__name__)

R = TypeVar("R")

TICK_S = 4.0
"""Seconds within which rank 0 sends the other ranks a command, be it an idle one."""
POLL_S = 1.0


class StoppedError(RuntimeError):
    """`stopping` was set in the middle of a rollout step; it is left to whoever comes next."""


class StateLostError(RuntimeError):
    """Redis came back with less than it had acknowledged. A learner that begins anew goes on where Redis stands."""


class Lead:
    """Rank 0 of a run's learner."""

    def __init__(self, context: Context, work: RankWork, world: int) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._work = work
        self._world = world
        self._policy = CommittedPolicy(version=0, step=0)
        self._committed: StepRecord | None = None
        self._done = False
        self._after = "0-0"

    async def run(self) -> None:
        """Take the run up, train until its rollout steps are done, then serve joiners until `stopping`."""
        context = self._context
        self._history = await History.fenced(context.redis, context.keys, "learner")
        self._publisher = Publisher(
            context.redis, context.keys, context.event_log, self._recipe.weights, context.host, self._history
        )
        await self._publisher.open(self._work.manifest)
        try:
            await self._take_up()
            await self._train_all()
            await self._meanwhile_idle(self._checkpointing.settle())
            await self._finish()
        except StoppedError:
            log.info("stopping: the step under way is left to whoever comes next")
        finally:
            await self._publisher.close()
            if hasattr(self, "_checkpointing"):
                await self._checkpointing.close()
        # After a failure nothing is sent: another rank may be inside a different collective. It notices us leave.
        await self._work.send(Command(do="stop"))

    async def _take_up(self) -> None:
        """Bring the policy to where the run stands: the committed step, or the older one it is resumed from."""
        record, policy = self._context.record, await self._history.policy()
        await self._meanwhile_idle(self._work.begin_archive(resumed=policy is not None))
        # Before the first policy version there is nothing to go back from.
        rewinds = policy is not None and record.resume_step is not None and policy.resumption < record.resumptions
        step = record.resume_step if rewinds and record.resume_step is not None else policy.step if policy else 0
        recovery = await self._recover(step)
        self._checkpointing = Checkpointing(
            self._context, self._history, self._work, recovery.start.step if recovery.start else 0
        )
        snapshot = await self._snapshot()
        if rewinds:
            await self._rewind(step, recovery)
        records = [one for _, one in await self._context.event_log.steps()]
        await self._meanwhile_idle(self._work.forget_after(step, records))
        self._committed = records[-1] if records and records[-1].step == step else None
        if self._committed:
            show_step(self._context.record.id, self._committed.metrics)
        await self._checkpointing.list()
        version = await self._history.announce(step, snapshot.digest)
        await self._history.commit_policy(version, step, snapshot.digest)
        self._policy = CommittedPolicy(version=version, step=step, weights=snapshot.digest)
        self._done = step >= self._recipe.limits.rollout_steps or await self._history.final_step() == step
        await self._publish(snapshot.numbered(version))
        await self._context.heartbeat.update(state="ready", version=version)
        same = f"version {policy.version} again, bit by bit" if policy and policy.version == version else "new"
        begun = f"the checkpoint of step {recovery.start.step}" if recovery.start else "the model"
        await self._context.event_log.write(
            "ready", f"learner ready at step {step}, from {begun} and {len(recovery.steps)} archived batches; policy "
            f"version {version} is served" + (f" ({same})" if policy else ""),
        )  # fmt: skip

    async def _recover(self, step: int) -> Recovery:
        deadline_s = self._recipe.limits.startup_timeout_s
        with self._context.waits.on("recovery", f"the checkpoints up to rollout step {step} to be checked", deadline_s):
            recovery = await self._meanwhile_idle(self._work.recover(step))
        for name, why in recovery.passed_over.items():
            await self._context.event_log.write("checkpoint-damaged", f"{name} is passed over: {why}")
        for again, why in recovery.repaired.items():
            await self._context.event_log.write("batch-repaired", f"step {again} is archived anew from Redis: {why}")
        if recovery.start:
            await self._work.send(Command(do="load", name=recovery.start.name))
            await self._work.restore(recovery.start.name)
        for again in recovery.steps:
            with self._context.waits.on("recovery", f"archived rollout step {again} of {step}", deadline_s):
                batch = await asyncio.to_thread(self._work.archive.batch, again)
                await self._work.send(Command(do="retrain", batch=batch))
                if await self._work.train(batch, archived=True) is None:
                    raise StoppedError
        return recovery

    async def _rewind(self, step: int, recovery: Recovery) -> None:
        """Lay the sampler's snapshot down and wait until the sampler has taken the run back to `step` too."""
        exact = recovery.start is not None and recovery.start.step == step
        text = self._work.checkpoints.sampler(recovery.start) if recovery.start and exact else None
        snapshot = (
            SamplerSnapshot.model_validate_json(text)
            if text
            else SamplerSnapshot(
                step=step, state=SamplerState(cursor=0, next_group=0), counts=GroupCounts(), response_tokens=0
            )
        )
        await self._history.publish_snapshot(snapshot)
        wanted, deadline_s = self._context.record.resumptions, self._recipe.limits.startup_timeout_s
        await self._until(self._rewound(wanted), "rewind", f"the sampler to go back to step {step}", deadline_s)

    async def _rewound(self, wanted: int) -> None:
        while True:
            policy = await self._history.policy()
            if policy and policy.resumption >= wanted:
                return
            await asyncio.sleep(0.2)

    async def _until(self, coming: Coroutine[Any, Any, R], name: str, what: str, deadline_s: float) -> R:
        """The result of `coming`; raises TimeoutError that names the wait, StoppedError."""
        stopping = asyncio.create_task(self._context.stopping.wait())
        task = asyncio.create_task(self._meanwhile_idle(coming))
        try:
            with self._context.waits.on(name, what, deadline_s):
                await asyncio.wait({task, stopping}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if stopping.done():
                raise StoppedError
            raise TimeoutError(f"waited {deadline_s:g} s for {what} ({name})")
        finally:
            task.cancel()
            stopping.cancel()

    async def _train_all(self) -> None:
        waits, patience = self._context.waits, self._recipe.limits.stall_timeout_s
        while not self._done and not self._context.stopping.is_set():
            self._publisher.check()
            waits.pending("batches", f"the batch of rollout step {self._policy.step + 1}", patience, idle=True)
            found = await self._history.batches(self._after, TICK_S if self._world > 1 else POLL_S)
            if not found:
                await self._check_redis()
                await self._work.send(Command(do="idle"))
            for logged in found:
                waits.done("batches")
                self._after = logged.entry
                await self._handle(logged)
            if self._committed and self._checkpointing.owed:
                await self._save(self._committed)

    async def _check_redis(self) -> None:
        """Raises StateLostError when Redis has forgotten a step that it had acknowledged."""
        policy = await self._history.policy()
        stands = policy.step if policy else 0
        if stands < self._policy.step:
            raise StateLostError(
                f"Redis stands at rollout step {stands}, and step {self._policy.step} was committed to it: it has lost "
                "acknowledged writes (appendfsync always keeps them)"
            )

    async def _handle(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        if batch.step > self._policy.step:
            if not await self._history.accepts(logged, self._policy.step + 1):
                return
            if too_old := self._too_old(batch):
                await self._context.event_log.write("batch-too-old", too_old)
                await self._history.return_batch(logged)
                return
        record = await self._train(logged) if batch.step == self._policy.step + 1 else None
        if record is None:
            log.info("step %d was trained before", batch.step)
        await self._checkpointing.trained(logged, now=record is not None)
        if record and self._work.due(batch.step) and not self._done:
            await self._save(record)

    def _too_old(self, batch: Batch) -> str | None:
        """Why a batch may not be trained any more: its step's weights were published again, under a later version."""
        late, bound = self._policy.version - batch.version, self._recipe.limits.max_staleness
        oldest = max(sample.staleness for group in batch.groups for sample in group.samples) + late
        if late <= 0 or oldest <= bound:
            return None
        return (
            f"step {batch.step} was made for policy version {batch.version}; at version {self._policy.version} its "
            f"oldest response is {oldest} versions old, {bound} is the bound (limits.max_staleness); it goes back"
        )

    async def _save(self, record: StepRecord) -> None:
        await self._meanwhile_idle(self._checkpointing.settle())
        await self._work.send(Command(do="save", step=record.step))
        await self._checkpointing.begin(record, self._context.keys.snapshot(record.step))

    async def _train(self, logged: LoggedBatch) -> StepRecord:
        batch, started_at = logged.batch, time.time()
        patience = self._recipe.limits.stall_timeout_s
        with self._context.waits.on("training", f"the optimizer steps of rollout step {batch.step}", patience):
            await self._work.send(Command(do="train", batch=batch))
            trained = await self._work.train(batch)
        if trained is None:
            raise StoppedError
        if trained.damaged:
            DAMAGED_PAYLOADS.labels(run=self._context.record.id, service="learner").inc(len(trained.damaged))
            await self._context.event_log.write("payload-damaged", f"step {batch.step}: {'; '.join(trained.damaged)}")
        record = _record(batch, trained, self._policy.version, started_at)
        await self._check_gradients(record, trained)
        snapshot = await self._snapshot()
        version = await self._history.announce(batch.step, snapshot.digest)
        record = record.model_copy(update={"version": version, "weights": snapshot.digest})
        seconds = await self._publish(snapshot.numbered(version))
        record = record.model_copy(update={"metrics": record.metrics | {"publish_seconds": seconds}})
        await self._history.commit_step(record, logged.entry)
        self._policy = CommittedPolicy(version=version, step=batch.step, weights=snapshot.digest)
        self._committed = record
        self._done = batch.last or batch.step >= self._recipe.limits.rollout_steps
        await self._context.heartbeat.update(version=version)
        show_step(self._context.record.id, record.metrics)
        write, what = partial(self._work.archive.write_record, record), f"the record of rollout step {record.step}"
        await self._meanwhile_idle(written(write, what, self._context.waits, self._recipe.limits.stall_timeout_s))
        return record

    async def _check_gradients(self, record: StepRecord, trained: Trained) -> None:
        """Report skipped optimizer steps. Raises NonFiniteGradientError after keeping the record as a failure."""
        if not trained.skipped:
            return
        SKIPPED_OPTIMIZER_STEPS.labels(run=self._context.record.id).inc(trained.skipped)
        await self._context.event_log.write(
            "non-finite-gradient",
            f"step {record.step}: {trained.skipped} of {len(trained.optimizer)} optimizer steps skipped, their "
            f"gradient was not finite; {self._work.non_finite_in_a_row} in a row by now",
        )
        try:
            self._work.check_gradients(record.step)
        except NonFiniteGradientError:
            write = partial(self._work.archive.write_failure, record)
            what, patience_s = f"the record of rollout step {record.step}", self._recipe.limits.stall_timeout_s
            await self._meanwhile_idle(written(write, what, self._context.waits, patience_s))
            raise

    async def _snapshot(self) -> Snapshot:
        await self._work.send(Command(do="snapshot"))
        snapshot = await self._work.snapshot()
        assert snapshot is not None, "rank 0 keeps it"
        self._last = snapshot
        return snapshot

    async def _publish(self, snapshot: Snapshot) -> float:
        what, patience = f"the fleet to hold policy version {snapshot.version}", 3 * self._recipe.weights.timeout_s
        with self._context.waits.on("weight-sync", what, patience):
            seconds = await self._meanwhile_idle(self._publisher.publish(snapshot))
        POLICY_VERSION.labels(run=self._context.record.id, service="learner").set(snapshot.version)
        return seconds

    async def _meanwhile_idle(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of rank 0's own `work`, while the other ranks hear that it lives."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
                await self._work.send(Command(do="idle"))
        finally:
            task.cancel()
        return task.result()

    async def _finish(self) -> None:
        """Export what was evaluated last. Until then and after, serve joiners: evaluation needs replicas."""
        waits, patience = self._context.waits, self._recipe.limits.stall_timeout_s
        exported = (await RunRecords(self._context.redis).get(self._context.record.id)).export_path is not None
        sets = ", ".join(self._recipe.evaluated_sets)
        if not exported and not self._context.stopping.is_set():
            await self._context.event_log.write("awaiting-evaluation", f"export waits for {AFTER!r} of {sets}")
        while not self._context.stopping.is_set():
            if exported:
                waits.done("evaluations")
            else:
                waits.pending("evaluations", f"the evaluation {AFTER!r} of {sets}", patience, idle=True)
                if evaluations := await self._final_evaluations():
                    await self._export(evaluations)
                    exported = True
            try:
                await asyncio.wait_for(self._context.stopping.wait(), TICK_S if exported else POLL_S)
            except TimeoutError:
                self._publisher.check()
                await self._work.send(Command(do="idle"))

    async def _final_evaluations(self) -> list[EvaluationRecord]:
        """The evaluation of the last version on every set; empty until all are there."""
        found = {one.set: one for one in await self._context.event_log.evaluations() if one.name == AFTER}
        wanted = self._recipe.evaluated_sets
        return [found[name] for name in wanted] if found.keys() >= set(wanted) else []

    async def _export(self, evaluations: list[EvaluationRecord]) -> None:
        run = self._context.record.id
        waits, patience = self._context.waits, self._recipe.limits.stall_timeout_s
        with waits.on("export", "the export to be written", patience):
            template = self._recipe.model.chat_template
            reading = partial(tokenizer_of, self._work.model_folder, template)
            tokenizer = await self._meanwhile_idle(written(reading, "the chat template", waits, patience))
            # Of the model in training only the names are read.
            writing = partial(export, self._work.causal_lm, self._last, tokenizer, export_folder(run), evaluations)
            folder = await self._meanwhile_idle(written(writing, "the export", waits, patience))
            place = await self._meanwhile_idle(written(partial(stored, folder, run), "the export", waits, patience))
        records = RunRecords(self._context.redis)
        await records.set_paths(run, self._history.epoch, "learner", export_path=place)
        await self._context.event_log.write("exported", f"policy version {self._policy.version} is in {place}")


def _record(batch: Batch, trained: Trained, consumed_at: int, started_at: float) -> StepRecord:
    """The record of a step that is not published yet: its `version` is still the one that it started from."""
    late = consumed_at - batch.version
    return StepRecord(
        step=batch.step, version=consumed_at, optimizer_steps=trained.optimizer_steps,
        groups=tuple(group.group for group in batch.groups), prompts=tuple(group.prompt for group in batch.groups),
        staleness=tuple(group.staleness + late for group in batch.groups),
        metrics=batch.sampling_metrics | trained.metrics,
        optimizer=trained.optimizer, generation_started_at=batch.generation_started_at,
        generation_finished_at=batch.generation_finished_at, learning_started_at=started_at,
        learning_finished_at=time.time(),
    )  # fmt: skip
