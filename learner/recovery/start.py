"""Owns the start point of a learner that resumes a run: a checkpoint, and the archived steps to retrain after it.

Must not train, write or delete anything, nor import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from learner.archive import FIRST_STEP, ArchiveError, RunArchive, step_name
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint
from services.contracts import Batch
from services.streams.delivery.payloads import SamplePayload

SHARE_RANK = re.compile(r"rank-(\d+)\.parquet")


class MissingBatchesError(ArchiveError):
    """The archive does not hold the batches of steps that must be retrained. `reasons`: why, by step."""

    def __init__(self, checkpoint: Checkpoint | None, reasons: dict[int, str], skipped: dict[str, str]) -> None:
        self.reasons = reasons
        start = f"the checkpoint of step {checkpoint.step}" if checkpoint else "the run's model"
        lines = [*reasons.values(), *skipped.values()]
        super().__init__(f"{len(reasons)} steps after {start} cannot be retrained: {'; '.join(lines)}")


@dataclass(frozen=True)
class StartPoint:
    """The `checkpoint` to load, or None for the run's model, and the archived `steps` to retrain after it.

    `skipped`: newer checkpoints that are damaged or incomplete, by name, with the reason. `repaired`: the steps whose
    batches were missing or damaged in the archive and were repaired from Redis, with the reason.
    """

    checkpoint: Checkpoint | None
    steps: tuple[int, ...]
    skipped: dict[str, str]
    repaired: Mapping[int, str] = field(default_factory=dict)


def find_start_point(archive: RunArchive, checkpoints: Checkpoints, committed: int) -> StartPoint:
    """How to restore the policy after rollout step `committed` (0: the run's model).

    Ignores later checkpoints, because the run was rewound to a step before them. Reads and checks all files that the
    start point needs. Raises MissingBatchesError.
    """
    checkpoint, skipped = checkpoints.newest_intact(committed)
    steps = tuple(range(checkpoint.step + 1 if checkpoint else FIRST_STEP, committed + 1))
    reasons = {}
    for step in steps:
        try:
            archived_payloads(archive, archive.batch(step))
        except ArchiveError as error:
            reasons[step] = str(error)
    if reasons:
        raise MissingBatchesError(checkpoint, reasons, skipped)
    return StartPoint(checkpoint, steps, skipped)


def archived_payloads(archive: RunArchive, batch: Batch) -> dict[str, SamplePayload]:
    """The payloads that training needs for a batch, by key, from any number of ranks' shares. Raises ArchiveError."""
    found: dict[str, SamplePayload] = {}
    archive.fetch_shares(batch.step)
    for rank in archiving_ranks(archive, batch.step) or [0]:
        found |= archive.share(batch.step, rank)
    wanted = trained_payloads(batch)
    missing = [payload for payload in wanted if payload not in found]
    if missing:
        shares = archive.share_path(batch.step, 0).with_name(f"{step_name(batch.step)}.rank-*.parquet")
        raise ArchiveError(f"{shares}: missing {len(missing)} of {len(wanted)} payloads, {missing[0]} among them")
    return {payload: found[payload] for payload in wanted}


def trained_payloads(batch: Batch) -> list[str]:
    """The keys of the payloads that are trained, and therefore archived: neither masked nor empty."""
    samples = (sample for group in batch.groups for sample in group.samples)
    return [sample.payload for sample in samples if sample.tokens and not sample.masked]


def archiving_ranks(archive: RunArchive, step: int) -> list[int]:
    """The ranks whose shares of a step are archived. Their number may differ between steps of a run."""
    folder = archive.share_path(step, 0).parent
    names = [path.name for path in folder.glob(f"{step_name(step)}.rank-*.parquet")]
    return sorted(int(match[1]) for match in map(SHARE_RANK.search, names) if match)
