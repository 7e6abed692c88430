"""Owns the learner that wrote the files of a test, and the records of the steps that it committed.

Must not be used outside tests, nor import torch.
"""

from __future__ import annotations

from learner.recovery.start import batch_digest
from services.contracts import Batch, Fence, StepRecord

WRITER = Fence(2, "learner-1a2b3c4d")


def record_of(batch: Batch, fence: Fence = WRITER, weights: str = "") -> StepRecord:
    """The committed record of a batch that the learner `fence` trained."""
    return StepRecord(
        step=batch.step,
        version=batch.step,
        optimizer_steps=2,
        groups=tuple(group.group for group in batch.groups),
        metrics={},
        generation_started_at=1.0,
        generation_finished_at=2.0,
        learning_started_at=3.0,
        learning_finished_at=4.0,
        weights=weights,
        batch_digest=batch_digest(batch),
        epoch=fence.epoch,
        owner=fence.owner,
    )
