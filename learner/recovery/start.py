"""Owns where a learner begins that takes over a run, and what it trains again: the way back to the last committed step.

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
    """Steps have to be trained again whose batches the archive does not hold whole: `reasons` by step."""

    def __init__(self, start: Checkpoint | None, reasons: dict[int, str], passed_over: dict[str, str]) -> None:
        self.reasons = reasons
        begun = f"the checkpoint of step {start.step}" if start else "the run's model"
        lines = [*reasons.values(), *passed_over.values()]
        super().__init__(f"{len(reasons)} steps after {begun} cannot be trained again: {'; '.join(lines)}")


@dataclass(frozen=True)
class Recovery:
    """From the `start` checkpoint, or without one from the run's model, the archived `steps` lead to the last one.

    `passed_over`: the newer checkpoints that are damaged or half-written, by name, and why. `repaired`: the steps
    whose batches were missing or damaged in the archive, and are back from Redis, and why.
    """

    start: Checkpoint | None
    steps: tuple[int, ...]
    passed_over: dict[str, str]
    repaired: Mapping[int, str] = field(default_factory=dict)


def recover(archive: RunArchive, checkpoints: Checkpoints, committed: int) -> Recovery:
    """How to come back to the policy behind rollout step `committed` (0: the run's model).

    Later checkpoints are not considered: who rewound the run has discarded them. Reads all that it returns once.
    Raises MissingBatchesError.
    """
    start, passed_over = checkpoints.newest_whole(committed)
    steps = tuple(range(start.step + 1 if start else FIRST_STEP, committed + 1))
    reasons = {}
    for step in steps:
        try:
            archived_payloads(archive, archive.batch(step))
        except ArchiveError as error:
            reasons[step] = str(error)
    if reasons:
        raise MissingBatchesError(start, reasons, passed_over)
    return Recovery(start, steps, passed_over)


def archived_payloads(archive: RunArchive, batch: Batch) -> dict[str, SamplePayload]:
    """The payloads that training takes of a batch, by key, of however many ranks archived it. Raises ArchiveError."""
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
    """Masked and empty responses are trained by nobody, so nobody archives them."""
    return [one.payload for group in batch.groups for one in group.samples if one.tokens and not one.masked]


def archiving_ranks(archive: RunArchive, step: int) -> list[int]:
    """Which ranks' shares of a step are archived; a run may go on with another number of them."""
    folder = archive.share_path(step, 0).parent
    names = [path.name for path in folder.glob(f"{step_name(step)}.rank-*.parquet")]
    return sorted(int(match[1]) for match in map(SHARE_RANK.search, names) if match)
