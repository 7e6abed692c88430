"""Owns how rank 0 starts: restore the policy of the step at which the run resumes, publish and commit it.

Must not read batches from the stream, nor train a step that was not committed before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.coordinator.publication import Publication
from learner.coordinator.waiting import LearnerStoppingError, idle_during, wait_until_stopping
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.recovery.start import StartPoint
from services.contracts import CommittedPolicy, GroupCounts, SamplerSnapshot, SamplerState, StepRecord
from services.metrics.recent import show_history
from services.process.hosting import Context

REWIND_POLL_S = 0.2


@dataclass(frozen=True)
class StartedRun:
    """The result of a start. `done`: whether all rollout steps of the run are committed already."""

    schedule: CheckpointSchedule
    done: bool


class RunStart:
    """The start of rank 0: at the committed step, or at an older one to which the run is rewound."""

    def __init__(self, context: Context, worker: RankWorker, publication: Publication) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._worker = worker
        self._publication = publication
        self._history = publication.history

    async def run(self) -> StartedRun:
        """Restore, rewind if the run is resumed from an older step, publish and commit. Raises LearnerStoppingError."""
        policy = await self._history.policy()
        rewinds, step = self._position(policy)
        records = [record for _, record in await self._context.event_log.steps() if record.step <= step]
        point = await self._restore(step, records)
        covered = point.checkpoint.step if point.checkpoint else 0
        schedule = CheckpointSchedule(self._context, self._history, self._worker, records, covered)
        restored = await self._publication.take_snapshot()
        await self._report_other_weights(point, restored.digest, records)
        # All that is needed of these batches is in the archive; a previous learner may not have released them.
        await idle_during(self._worker, self._history.release_committed(policy.step if policy else 0))
        if rewinds:
            await self._rewind(step, point)
        # A replaced learner fails here, before it deletes files of the steps after this one.
        await schedule.publish_list(step)
        await self._sync_files(step, records)
        version = await self._publication.commit_start(step)
        done = step >= self._recipe.limits.rollout_steps or await self._history.final_step() == step
        await idle_during(self._worker, self._publication.publish(version))
        await self._context.heartbeat.update(state="ready", version=version)
        await self._context.event_log.write("ready", _summary(point, step, version, policy))
        return StartedRun(schedule, done)

    def _position(self, policy: CommittedPolicy | None) -> tuple[bool, int]:
        """(whether the run is rewound, the step to restore), given the committed policy."""
        record = self._context.record
        # Before the first policy version there is nothing to rewind.
        if policy is not None and record.resume_step is not None and policy.resumption < record.resumptions:
            return True, record.resume_step
        return False, policy.step if policy else 0

    async def _restore(self, step: int, records: list[StepRecord]) -> StartPoint:
        """Load the start point for `step` on all ranks, and retrain the archived steps after it.

        `records`: of the steps up to `step`.
        """
        deadline_s, event_log = self._recipe.limits.startup_timeout_s, self._context.event_log
        with self._context.waits.on("recovery", f"the checkpoints up to rollout step {step} to be checked", deadline_s):
            finding = self._worker.resume.find_start_point(step, records, self._history.fence)
            point = await idle_during(self._worker, finding)
        for name, reason in point.skipped.items():
            await event_log.write("checkpoint-damaged", f"checkpoint {name} is skipped: {reason}")
        if point.checkpoint:
            await self._worker.send(Command(do="load", name=point.checkpoint.name))
            await self._worker.resume.restore(point.checkpoint.name)
        committed, first_rate = {record.step: record for record in records}, self._context.record.first_learning_rate
        for archived in point.steps:
            with self._context.waits.on("recovery", f"archived rollout step {archived} of {step}", deadline_s):
                writer, rate = committed[archived].fence, committed[archived].learning_rate or first_rate
                batch = await asyncio.to_thread(self._worker.archive.batch, archived, writer)
                await self._worker.send(Command(do="retrain", batch=batch, fence=writer, learning_rate=rate))
                training = self._worker.training.train(batch, writer, learning_rate=rate, archived=True)
                if await training is None:
                    raise LearnerStoppingError
        return point

    async def _report_other_weights(self, point: StartPoint, found: str, records: list[StepRecord]) -> None:
        """Write an event if the restored policy has other weights than the last of `records`, or than the checkpoint.

        After archived steps were trained again that is no error: several ranks or a GPU may sum in another order.
        """
        event_log, checkpoint = self._context.event_log, point.checkpoint
        if point.steps and records[-1].weights not in ("", found):
            step, expected = records[-1].step, records[-1].weights
            text = f"step {step}: trained again, its weights are {found}; the committed step has {expected}"
            await event_log.write("retrained-differs", text)
        elif checkpoint and not point.steps and checkpoint.saved_weights not in ("", found):
            text = f"step {checkpoint.step}: the weights loaded from checkpoint {checkpoint.name} are {found}"
            await event_log.write("archive-differs", f"{text}; those that it saved are {checkpoint.saved_weights}")

    async def _rewind(self, step: int, point: StartPoint) -> None:
        """Store the sampler's snapshot of `step` in Redis, and wait until the sampler has rewound the run to it."""
        exact = point.checkpoint is not None and point.checkpoint.step == step
        read, checkpoint = self._worker.checkpoints.sampler, point.checkpoint
        text = await asyncio.to_thread(read, checkpoint) if checkpoint and exact else None
        await self._history.publish_snapshot(SamplerSnapshot.model_validate_json(text) if text else _empty(step))
        wanted, deadline_s = self._context.record.resumptions, self._recipe.limits.startup_timeout_s
        rewound = idle_during(self._worker, self._rewound(wanted))
        await wait_until_stopping(
            self._context, rewound, "rewind", f"the sampler to rewind the run to step {step}", deadline_s
        )

    async def _rewound(self, wanted: int) -> None:
        while True:
            policy = await self._history.policy()
            if policy and policy.resumption >= wanted:
                return
            await asyncio.sleep(REWIND_POLL_S)

    async def _sync_files(self, step: int, records: list[StepRecord]) -> None:
        """Make the run's folder match its history up to `step`, and set the metrics from the last committed record."""
        await idle_during(self._worker, self._worker.resume.delete_after(step, records, self._history.fence))
        if records and records[-1].step == step:
            self._publication.record = records[-1]
            show_history(self._context.record.id, [record.metrics for record in records])


def _empty(step: int) -> SamplerSnapshot:
    state = SamplerState(cursor=0, next_group=0)
    return SamplerSnapshot(step=step, state=state, counts=GroupCounts(), response_tokens=0)


def _summary(point: StartPoint, step: int, version: int, policy: CommittedPolicy | None) -> str:
    """The text of the event `ready`; `policy` is the one committed before the start."""
    start = f"the checkpoint of step {point.checkpoint.step}" if point.checkpoint else "the model"
    text = (
        f"learner ready at step {step}, from {start} and {len(point.steps)} archived batches; "
        f"policy version {version} is served"
    )
    if policy is None:
        return text
    return text + (" (bit-identical to the committed one)" if policy.version == version else " (new)")
