"""Owns rank 0's training loop: read the next batch, train it on all ranks, commit the step, save checkpoints.

Must not start or end a run, nor touch the policy. The commit of a step runs in the background and sends no commands to
the other ranks; the loop does.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.coordinator.parity_gate import differing, explanation
from learner.coordinator.publication import Publication
from learner.coordinator.waiting import POLL_S, TICK_S, LearnerStoppingError, idle_during
from learner.rank.batch_training import NonFiniteGradientError
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.storage_retry import retry_storage
from learner.training.results import Trained
from services.contracts import Batch, Fence, StepRecord
from services.metrics import DAMAGED_PAYLOADS, SKIPPED_OPTIMIZER_STEPS
from services.metrics.recent import show_committed
from services.process.hosting import Context
from services.streams.delivery.snapshots import read_snapshot
from services.streams.state.policy_history import LoggedBatch, StateLostError
from services.streams.state.run_record import LEARNING_RATE

log = logging.getLogger(__name__)


class TrainingLoop:
    """The loop over the stream of batches, until the run's rollout steps are done or `stopping` is set."""

    def __init__(
        self,
        context: Context,
        worker: RankWorker,
        publication: Publication,
        schedule: CheckpointSchedule,
        *,
        done: bool,
        world: int,
    ) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._worker = worker
        self._publication = publication
        self._history = publication.history
        self._schedule = schedule
        self._done = done
        self._block_s = TICK_S if world > 1 else POLL_S
        self._after = "0-0"
        self._free_at = 0.0  # since when the learner waits for a batch (monotonic clock)
        self._waited_s = 0.0

    async def run(self) -> None:
        """Train every batch of the stream. When a rank is asked to stop, write the checkpoint that is owed, and end.

        Raises LearnerStoppingError, StateLostError, NonFiniteGradientError, and the errors of the History.
        """
        waits, patience_s = self._context.waits, self._recipe.limits.stall_timeout_s
        self._free_at = time.monotonic()
        while not self._done and not self._worker.stopping:
            self._publication.check()
            step = self._publication.latest.step + 1
            waits.pending("batches", f"the batch of rollout step {step}", patience_s, idle=True)
            found = await self._history.batches(self._after, self._block_s)
            if not found:
                await self._check_redis()
                await self._worker.send(Command(do="idle"))
            for logged in found:
                waits.done("batches")
                self._waited_s = time.monotonic() - self._free_at
                self._after = logged.entry
                await self._handle(logged)
                self._free_at = time.monotonic()
            await self._save_overdue()
        if not self._done:
            await self.save_last()
            raise LearnerStoppingError
        await self._settle()
        await self._save_overdue()  # the last step counts since its commit, which has ended only now

    async def save_last(self) -> None:
        """Before the learner stops, write the checkpoint of the last committed step, so that none is trained again.

        The host ends this process when its time is over; what is written of a checkpoint by then is deleted later.
        """
        await self._settle()
        await idle_during(self._worker, self._schedule.settle())
        if self._publication.record and self._schedule.owed and self._worker.between_steps:
            log.info("stopping: a checkpoint of step %d is written first", self._publication.record.step)
            await self._save()
            await idle_during(self._worker, self._schedule.settle())

    async def _save_overdue(self) -> None:
        if self._publication.record and self._schedule.overdue:
            await self._save()

    async def _settle(self) -> None:
        await idle_during(self._worker, self._publication.settle())

    async def _check_redis(self) -> None:
        """Raise StateLostError if Redis lost a committed step."""
        committed = self._publication.policy.step  # before the look: the commit in the background goes on meanwhile
        policy = await self._history.policy()
        found = policy.step if policy else 0
        if found < committed:
            raise StateLostError(committed)

    async def _handle(self, logged: LoggedBatch) -> None:
        step, latest = logged.batch.step, self._publication.latest.step
        if step <= latest:
            log.info("step %d was already trained", step)
            await self._settle()
            await idle_during(self._worker, self._history.release_batch(logged))
            return
        if not await self._history.accepts(logged, latest + 1):
            return
        await self._train(logged)
        if self._worker.checkpoint_writer.due(step) and not self._done:
            await self._save()

    async def _save(self) -> None:
        """Write a checkpoint of the last trained step, which has to be committed first."""
        await self._settle()
        await idle_during(self._worker, self._schedule.settle())
        record = self._publication.record
        assert record is not None, "a step was committed"
        # It stays in Redis until the batch of the next step is released.
        reading = read_snapshot(self._context.redis, self._context.keys.snapshot(record.step))
        snapshot = await idle_during(self._worker, reading)
        await self._worker.send(Command(do="save", step=record.step, fence=self._history.fence))
        await self._schedule.save(record, self._publication.policy, snapshot)

    async def _train(self, logged: LoggedBatch) -> None:
        """Train a batch on all ranks, while the step before it may still be on its way to the fleet."""
        batch, started_at, version = logged.batch, time.time(), self._publication.latest.version
        rate = await self._learning_rate(batch.step)
        patience_s = self._recipe.limits.stall_timeout_s
        with self._context.waits.on("training", f"the optimizer steps of rollout step {batch.step}", patience_s):
            fence = self._history.fence
            await self._worker.send(Command(do="train", batch=batch, fence=fence, version=version, learning_rate=rate))
            committed = self._publication.wait_committed
            training = self._worker.training.train(batch, fence, version, learning_rate=rate, before_update=committed)
            trained = await training
        if trained is None:
            await self.save_last()
            raise LearnerStoppingError
        if trained.damaged:
            DAMAGED_PAYLOADS.labels(run=self._context.record.id, service="learner").inc(len(trained.damaged))
            await self._context.event_log.write("payload-damaged", f"step {batch.step}: {'; '.join(trained.damaged)}")
        await self._check_engines(trained, batch.step, version)
        unpublished = step_record(batch, trained, version, started_at, self._history.fence, rate)
        await self._check_gradients(unpublished, trained)
        await self._settle()
        waits = {"batch_wait_seconds": self._waited_s, "commit_wait_seconds": self._publication.take_waited_s()}
        unpublished = unpublished.model_copy(update={"metrics": unpublished.metrics | waits})
        await self._publication.start_commit(unpublished, logged.entry, partial(self._after_commit, logged))
        self._done = batch.last or batch.step >= self._recipe.limits.rollout_steps

    async def _after_commit(self, logged: LoggedBatch, record: StepRecord) -> None:
        """In the background: show a committed step, write its record and release its batch."""
        self._schedule.committed(record)
        await self._context.heartbeat.update(version=record.version)
        show_committed(self._context.record.id, record.metrics)
        write = partial(self._worker.archive.write_record, record)
        what, patience_s = f"the record of rollout step {record.step}", self._recipe.limits.stall_timeout_s
        await retry_storage(write, what, self._context.waits, patience_s)
        # A checkpoint of this step may wait long for the one before it: the payloads leave Redis meanwhile. The
        # sampler's snapshot that the checkpoint needs stays until the next release.
        await self._history.release_batch(logged)

    async def _learning_rate(self, step: int) -> float:
        """That of the next rollout step; a change is an event."""
        before = self._context.record.recipe.learner.learning_rate
        await idle_during(self._worker, self._context.refresh())
        rate = self._context.record.recipe.learner.learning_rate
        if rate != before:
            text = f"{LEARNING_RATE} {before:g} -> {rate:g} from rollout step {step} on"
            await self._context.event_log.write("rate-edited", text)
        return rate

    async def _check_engines(self, trained: Trained, step: int, version: int) -> None:
        """Report replicas whose log-probs differ from the learner's, and count them in the step's metrics."""
        limit = self._recipe.max_logprob_difference
        found = differing(trained.differences, limit)
        trained.metrics["logprob_off_replicas"] = float(len(found))
        if found:
            await self._context.event_log.write("logprobs-differ", explanation(step, version, found, limit))

    async def _check_gradients(self, record: StepRecord, trained: Trained) -> None:
        """Report skipped optimizer steps. Raises NonFiniteGradientError after archiving the record as a failure."""
        if not trained.skipped:
            return
        training = self._worker.training
        SKIPPED_OPTIMIZER_STEPS.labels(run=self._context.record.id).inc(trained.skipped)
        await self._context.event_log.write(
            "non-finite-gradient",
            f"step {record.step}: {trained.skipped} of {len(trained.optimizer)} optimizer steps skipped because of a "
            f"non-finite gradient; {training.non_finite_in_a_row} in a row so far",
        )
        try:
            training.check_gradients(record.step, record.fence)
        except NonFiniteGradientError:
            write = partial(self._worker.archive.write_failure, record)
            what, patience_s = f"the record of rollout step {record.step}", self._recipe.limits.stall_timeout_s
            await idle_during(self._worker, retry_storage(write, what, self._context.waits, patience_s))
            raise


def step_record(
    batch: Batch, trained: Trained, trained_at: int, started_at: float, fence: Fence, learning_rate: float
) -> StepRecord:
    """The record of a step that is not published yet. Its `version` is `trained_at`, from which the step started.

    `started_at`: when its training started, Unix seconds. `fence`: that of the learner. `learning_rate`: before any
    warm-up.
    """
    return StepRecord(
        step=batch.step,
        version=trained_at,
        optimizer_steps=trained.optimizer_steps,
        groups=tuple(group.group for group in batch.groups),
        prompts=tuple(group.prompt for group in batch.groups),
        staleness=tuple(group.staleness for group in batch.groups),
        metrics=batch.sampling_metrics | trained.metrics,
        optimizer=trained.optimizer,
        generation_started_at=batch.generation_started_at,
        generation_finished_at=batch.generation_finished_at,
        learning_started_at=started_at,
        learning_finished_at=time.time(),
        batch_digest=trained.batch_digest,
        epoch=fence.epoch,
        owner=fence.owner,
        learning_rate=learning_rate,
        optimizer_step_of=tuple(trained.step_of.get(group.group) for group in batch.groups),
    )
