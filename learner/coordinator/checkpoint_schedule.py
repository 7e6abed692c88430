"""Owns when checkpoints are written beside training, and what follows from one: the batches it covers are let go.

Must not know what a checkpoint holds of the policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from learner.checkpoint.manifest import CheckpointError, Consumed
from learner.rank.worker import RankWork
from services.cancellation import cancel_and_wait
from services.contracts import StepRecord
from services.process import Context
from services.streams.state.policy_history import History, LoggedBatch
from services.streams.state.snapshots import read_snapshot

log = logging.getLogger(__name__)

WAIT, OWED = "checkpoint", "checkpoint-owed"
RETRY_S = 30.0


class Checkpointing:
    """Rank 0's side. One checkpoint is written at a time, in the background."""

    def __init__(self, context: Context, history: History, work: RankWork, covered: int) -> None:
        """`covered`: the rollout step of the checkpoint that the run goes on from; 0: the run's model."""
        self._context = context
        self._history = history
        self._work = work
        self._covered = covered
        self._uncovered: deque[LoggedBatch] = deque()
        self._consumed: Consumed = {}
        self._writing: asyncio.Task[None] | None = None
        self._try_at = 0.0

    @property
    def writing(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def owed(self) -> bool:
        """Whether a checkpoint is overdue, because writing one failed or nobody came to it, and may be tried now."""
        every = self._context.record.recipe.learner.checkpoint_every
        late = self._work.checkpoints_wanted and len(self._uncovered) >= every
        return late and not self.writing and time.monotonic() >= self._try_at

    async def trained(self, logged: LoggedBatch, *, now: bool) -> None:
        """Note a batch whose step is committed, just `now` or by a learner before.

        It stays in Redis until a checkpoint covers it. A run without checkpoints has its archive alone to go back to,
        which holds the batch by now.
        """
        self._uncovered.append(logged)
        if now:  # else it may be another entry of that step, that somebody has added
            self._consumed[logged.batch.step] = tuple(group.group for group in logged.batch.groups)
        if not self._work.checkpoints_wanted:
            self._covered = logged.batch.step
        await self._cover()

    async def begin(self, record: StepRecord, batch_snapshot: str) -> None:
        """Copy the state behind a committed step and begin to write it. Collective, after the command to save."""
        try:
            await self._work.save(record.step)
        except CheckpointError as error:
            await self._failed(record, error)
            return
        self._writing = asyncio.create_task(self._commit(record, batch_snapshot), name=f"checkpoint of {record.step}")

    async def settle(self) -> None:
        """Wait for the one that is being written. Raises what broke it other than a failure to write."""
        if self._writing is not None:
            deadline_s = self._context.record.recipe.limits.stall_timeout_s
            with self._context.waits.on(WAIT, "the checkpoint that is being written", deadline_s):
                await self._writing
            self._writing = None

    async def close(self) -> None:
        """Give up the one that is being written."""
        if self._writing is not None:
            await cancel_and_wait(self._writing)

    async def _commit(self, record: StepRecord, batch_snapshot: str) -> None:
        snapshot = await read_snapshot(self._context.redis, batch_snapshot)
        try:
            checkpoint = await self._work.commit_checkpoint(
                record.step, record.version, weights=record.weights,
                sampler=snapshot.model_dump_json() if snapshot else None, consumed=self._consumed.copy(),
            )  # fmt: skip
        except CheckpointError as error:
            await self._failed(record, error)
            return
        self._covered = record.step
        self._consumed = {step: groups for step, groups in self._consumed.items() if step > record.step}
        self._context.waits.done(OWED)
        await self._cover()
        await self.list()
        mib = checkpoint.size / 2**20
        await self._context.event_log.write(
            "checkpoint", f"policy version {record.version}, step {record.step}: {mib:.0f} MiB"
        )

    async def _failed(self, record: StepRecord, error: CheckpointError) -> None:
        self._try_at = time.monotonic() + RETRY_S
        patience = self._context.record.recipe.limits.stall_timeout_s
        self._context.waits.pending(OWED, f"room for a checkpoint, or the store: {error}", patience)
        await self._context.event_log.write("checkpoint-failed", f"step {record.step}: {error}; training goes on")

    async def _cover(self) -> None:
        while self._uncovered and self._uncovered[0].batch.step <= self._covered:
            await self._history.cover_batch(self._uncovered.popleft())

    async def list(self) -> None:
        """Tell people which steps can be gone back to."""
        steps = await asyncio.to_thread(lambda: [one.step for one in self._work.checkpoints.complete()])
        await self._history.publish_checkpoints(sorted(set(steps)))
