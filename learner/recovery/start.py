"""Owns the start point of a learner that resumes a run: a checkpoint, and the archived steps to retrain after it.

Must not train, write or delete anything, nor import torch.

Redis is the truth. A learner that was replaced may have written files of a step that another one committed. The files
that a step's committed record names count, as long as they match it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from learner.archive import DIFFERS, FIRST_STEP, ArchiveError, RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint
from services.contracts import Batch, Fence, StepRecord
from services.streams.delivery.payloads import SamplePayload

SHARE_RANK = re.compile(r"rank-(\d+)\.parquet")


@dataclass(frozen=True)
class Difference:
    """A batch that `writer` archived, or the checkpoint of that name, which does not match the record of its step."""

    step: int
    what: str
    writer: Fence | None = None
    checkpoint: str = ""


class MissingBatchesError(ArchiveError):
    """The archive does not hold the batches of steps that must be retrained. The text names the files."""

    def __init__(self, run: str, point: StartPoint) -> None:
        start = f"the checkpoint of step {point.checkpoint.step}" if point.checkpoint else "the run's model"
        older = f"{point.checkpoint.step}, or 0 for the run's model" if point.checkpoint else "0, the run's model"
        faults = "; ".join([*point.missing.values(), *point.skipped.values()])
        super().__init__(
            f"{len(point.missing)} steps after {start} cannot be retrained: {faults}; restore these files, or continue "
            f"from an older step: `penstock resume {run} --from STEP`, where STEP is {older}"
        )


@dataclass(frozen=True)
class StartPoint:
    """The `checkpoint` to load, or None for the run's model, and the archived `steps` to retrain after it.

    `skipped`: newer checkpoints that are damaged or incomplete, by name, with the reason. `differing`: files that do
    not match the committed records. `missing`: the steps that cannot be retrained, with the reason.
    """

    checkpoint: Checkpoint | None
    steps: tuple[int, ...]
    skipped: dict[str, str]
    differing: tuple[Difference, ...] = ()
    missing: Mapping[int, str] = field(default_factory=dict)


def find_start_point(
    archive: RunArchive, checkpoints: Checkpoints, committed: int, records: Mapping[int, StepRecord]
) -> StartPoint:
    """How to restore the policy after rollout step `committed` (0: the run's model). `records`: those of all steps.

    Ignores later checkpoints, because the run was rewound to a step before them. Reads and checks all files that the
    start point needs.
    """
    differing = [*_differing_checkpoints(checkpoints, committed, records), *_late_batches(archive, committed, records)]
    checkpoint, skipped = checkpoints.newest_intact(committed, {difference.checkpoint for difference in differing})
    steps = tuple(range(checkpoint.step + 1 if checkpoint else FIRST_STEP, committed + 1))
    missing: dict[int, str] = {}
    for step in steps:
        record = records.get(step)
        if record is None:
            missing[step] = f"Redis has no record of step {step}"
            continue
        path = archive.batch_path(step, record.fence)
        try:
            batch = archive.batch(step, record.fence)
            if what := _other_batch(batch, record):
                differing.append(Difference(step, what, record.fence))
                raise ArchiveError(f"{path}: {what}")
            archived_payloads(archive, batch, record.fence)
        except ArchiveError as error:
            # An earlier start may have set it aside, and failed.
            aside = path.with_name(f"{DIFFERS}{path.name}")
            missing[step] = f"{error}; {aside.name} did not match the committed step" if aside.exists() else str(error)
    return StartPoint(checkpoint, steps, skipped, tuple(differing), missing)


def other_weights(checkpoint: Checkpoint, record: StepRecord | None) -> str:
    """How a checkpoint differs from the committed record of its step; '' if it does not."""
    if record is None:
        return f"step {checkpoint.step} has no committed record"
    if checkpoint.belongs_to({record.step: record.weights}):
        return ""
    return f"its weights are {checkpoint.weights}, but those of the committed step are {record.weights}"


def _differing_checkpoints(
    checkpoints: Checkpoints, committed: int, records: Mapping[int, StepRecord]
) -> Iterator[Difference]:
    for checkpoint in checkpoints.complete():
        if checkpoint.step <= committed and (what := other_weights(checkpoint, records.get(checkpoint.step))):
            yield Difference(checkpoint.step, what, checkpoint=checkpoint.name)


def _late_batches(archive: RunArchive, committed: int, records: Mapping[int, StepRecord]) -> Iterator[Difference]:
    """The batches of committed steps that other learners than the recorded one archived, with other content."""
    for step, writer in archive.batches():
        record = records.get(step)
        if step > committed or record is None or writer == record.fence:
            continue
        try:
            what = _other_batch(archive.batch(step, writer), record)
        except ArchiveError as error:
            what = str(error)
        if what:
            yield Difference(step, what, writer)


def _other_batch(batch: Batch, record: StepRecord) -> str:
    """How a batch differs from the committed record of its step; '' if it does not.

    Older releases recorded no digest of the batch, only its groups.
    """
    groups = tuple(group.group for group in batch.groups)
    if groups != record.groups:
        others = sorted({*groups} ^ {*record.groups})
        return f"its groups are not those of the committed step: {', '.join(others[:4]) or 'another order'}"
    if record.batch_digest and record.batch_digest != batch_digest(batch):
        return "its samples are not those of the committed step: another payload, length, advantage or mask"
    return ""


def batch_digest(batch: Batch) -> str:
    """The digest of what a batch trains: its groups, their samples, advantages and masks, all in order.

    It names each field, so that a field which a newer release adds does not change the digests of archived batches.
    """
    trained = [
        [group.group, *([sample.payload, sample.tokens, sample.advantage, sample.masked] for sample in group.samples)]
        for group in batch.groups
    ]
    return hashlib.sha256(json.dumps(trained).encode()).hexdigest()[:32]


def archived_payloads(archive: RunArchive, batch: Batch, fence: Fence) -> dict[str, SamplePayload]:
    """The payloads that training needs for a batch which a learner archived, by key, from any number of ranks' shares.

    Raises ArchiveError.
    """
    found: dict[str, SamplePayload] = {}
    archive.fetch_shares(batch.step, fence)
    for rank in archiving_ranks(archive, batch.step, fence) or [0]:
        found |= archive.share(batch.step, rank, fence)
    wanted = trained_payloads(batch)
    missing = [payload for payload in wanted if payload not in found]
    if missing:
        shares = archive.share_path(batch.step, 0, fence)
        pattern = shares.with_name(shares.name.replace("rank-0", "rank-*"))
        raise ArchiveError(f"{pattern}: missing {len(missing)} of {len(wanted)} payloads, {missing[0]} among them")
    return {payload: found[payload] for payload in wanted}


def trained_payloads(batch: Batch) -> list[str]:
    """The keys of the payloads that are trained, and therefore archived: neither masked nor empty."""
    samples = (sample for group in batch.groups for sample in group.samples)
    return [sample.payload for sample in samples if sample.tokens and not sample.masked]


def archiving_ranks(archive: RunArchive, step: int, fence: Fence) -> list[int]:
    """The ranks whose shares of a step are archived. Their number may differ between steps of a run."""
    first = archive.share_path(step, 0, fence)
    names = [path.name for path in first.parent.glob(first.name.replace("rank-0", "rank-*"))]
    return sorted(int(match[1]) for match in map(SHARE_RANK.search, names) if match)
