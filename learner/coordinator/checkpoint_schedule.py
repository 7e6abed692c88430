"""Owns when rank 0 writes checkpoints while training continues.

Must not know what a checkpoint's files hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from learner.checkpoint.manifest import CheckpointError, ConsumedGroups
from learner.rank.worker import RankWorker
from services.contracts import CommittedPolicy, SamplerSnapshot, StepRecord
from services.process.hosting import Context
from services.streams.state.policy_history import History
from services.waits import cancel_and_wait

log = logging.getLogger(__name__)

WAIT, OVERDUE_WAIT = "checkpoint", "checkpoint-owed"
RETRY_S = 30.0


class CheckpointSchedule:
    """The checkpoints of a run, as rank 0 writes them: one at a time, in the background."""

    def __init__(
        self, context: Context, history: History, worker: RankWorker, records: Iterable[StepRecord], covered: int
    ) -> None:
        """`records`: those of the committed steps. `covered`: the step of the checkpoint that was loaded, or 0."""
        self._context = context
        self._history = history
        self._worker = worker
        self._consumed: ConsumedGroups = {}
        self._weights: dict[int, str] = {}
        for record in records:
            self._weights[record.step] = record.weights
            if record.step > covered:
                self._consumed[record.step] = record.groups
        self._writing: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def overdue(self) -> bool:
        """Whether a checkpoint that failed, or was never started, is late and may be tried now."""
        every = self._context.record.recipe.learner.checkpoint_every
        late = self._worker.checkpoint_writer.wanted and len(self._consumed) >= every
        return late and not self.writing and time.monotonic() >= self._retry_at

    @property
    def owed(self) -> bool:
        """Whether committed steps are in no checkpoint: a restarted learner would train them again."""
        return self._worker.checkpoint_writer.wanted and bool(self._consumed)

    def committed(self, record: StepRecord) -> None:
        """Note a step that was committed; the next checkpoint names its groups."""
        self._weights[record.step] = record.weights
        if self._worker.checkpoint_writer.wanted:
            self._consumed[record.step] = record.groups

    async def save(self, record: StepRecord, policy: CommittedPolicy, snapshot: SamplerSnapshot | None) -> None:
        """Copy the state after the last committed step and start writing it. Collective, after the command `save`.

        `policy`: the committed one, whose state is copied; its weights are not those of `record` if a restart trained
        the step again with another result. `snapshot`: the sampler's of that step.
        """
        try:
            await self._worker.checkpoint_writer.save(record.step, self._history.fence)
        except CheckpointError as error:
            await self._report_failure(record, error)
            return
        self._writing = asyncio.create_task(self._commit(record, policy, snapshot), name=f"checkpoint of {record.step}")

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises its error, unless that was a CheckpointError."""
        if self._writing is not None:
            deadline_s = self._context.record.recipe.limits.stall_timeout_s
            with self._context.waits.on(WAIT, "the checkpoint that is being written", deadline_s):
                await self._writing
            self._writing = None

    async def close(self) -> None:
        """Abandon the checkpoint that is being written."""
        if self._writing is not None:
            await cancel_and_wait(self._writing)

    async def _commit(self, record: StepRecord, policy: CommittedPolicy, snapshot: SamplerSnapshot | None) -> None:
        try:
            checkpoint = await self._worker.checkpoint_writer.commit(
                record.step,
                policy.version,
                self._history.fence,
                weights=record.weights,
                saved_weights=policy.weights,
                sampler=snapshot.model_dump_json() if snapshot else None,
                consumed={step: groups for step, groups in self._consumed.items() if step <= record.step},
            )
        except CheckpointError as error:
            await self._report_failure(record, error)
            return
        self._consumed = {step: groups for step, groups in self._consumed.items() if step > record.step}
        self._context.waits.done(OVERDUE_WAIT)
        # A previous owner fails here, before it deletes what the run still needs.
        await self.publish_list(record.step, self._context.record.recipe.learner.checkpoints_kept)
        await self._worker.checkpoint_writer.prune(record.step, self._history.fence, self._weights)
        mib = checkpoint.size / 2**20
        text = f"policy version {policy.version}, step {record.step}: {mib:.0f} MiB"
        await self._context.event_log.write("checkpoint", text)

    async def _report_failure(self, record: StepRecord, error: CheckpointError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        patience_s = self._context.record.recipe.limits.stall_timeout_s
        self._context.waits.pending(OVERDUE_WAIT, f"room for a checkpoint, or the store: {error}", patience_s)
        await self._context.event_log.write("checkpoint-failed", f"step {record.step}: {error}; training continues")

    async def publish_list(self, up_to: int, most: int = 0) -> None:
        """Publish the rollout steps up to `up_to` from which the run can be resumed; the last `most`, 0 for all.

        A checkpoint of other weights than the step's committed ones is of an abandoned history, and does not count.
        """
        complete = await asyncio.to_thread(self._worker.checkpoints.complete)
        found = {checkpoint.step for checkpoint in complete if checkpoint.belongs_to(self._weights)}
        steps = sorted(step for step in found if step <= up_to)
        await self._history.publish_checkpoints(steps[-most:])
