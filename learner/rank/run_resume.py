"""Owns how one rank resumes a run: open the archive, find the start point, load its checkpoint, delete newer files.

Must not train. Rank 0 calls every method; the other ranks call only `restore`, which is collective.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata

import torch

from learner.archive import CHECKPOINTS, DIFFERS, RunFacts
from learner.rank.context import RankContext
from learner.recovery.start import Difference, MissingBatchesError, StartPoint, find_start_point
from services.contracts import Fence, StepRecord

log = logging.getLogger(__name__)

EXCHANGE_S = 2.0
"""Seconds between two exchanges of ranks that wait for each other's files."""
VERSIONS_OF = ("torch", "deepspeed", "transformers")


class RunResume:
    """The files of the run that one rank needs to resume it."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank

    async def newest_epoch(self) -> int:
        """The highest epoch of a learner in the run's archive. Redis may have lost it in a failover."""
        return await self._rank.retry_storage(self._rank.archive.newest_epoch, "the names in the run's archive")

    async def open_archive(self, fence: Fence, *, resumed: bool) -> None:
        """Fetch the run's archive from the store, if there is one, and write the run's facts.

        Raises ArchiveError if the archive holds another run and this one is not `resumed`.
        """
        record = self._rank.service.record
        facts = RunFacts(
            run=record.id,
            project=record.project,
            created_at=record.created_at,
            recipe=record.recipe,
            model_path=str(record.model_path),
            ranks=self._rank.world,
            device=self._rank.ranks.device.type,
            inputs=dict(record.inputs),
            versions={name: metadata.version(name) for name in VERSIONS_OF},
        )
        await self._rank.retry_storage(partial(self._open_archive, facts, fence, resumed), "the run's archive")

    def _open_archive(self, facts: RunFacts, fence: Fence, resumed: bool) -> None:
        self._rank.archive.sync_with_store(facts.created_at)
        self._rank.checkpoints.stored.fetch_manifests()
        self._rank.archive.start(facts, fence, resumed=resumed)

    async def find_start_point(self, committed: int, records: Sequence[StepRecord], fence: Fence) -> StartPoint:
        """How to restore the policy of rollout step `committed`; `records`: of all committed steps.

        Call it before the first save. Deletes what interrupted writes left, and sets aside damaged checkpoints and the
        files that differ from the records, as far as the owner of `fence` may; events report the latter. Raises
        MissingBatchesError.
        """
        what, service = "the run's checkpoints", self._rank.service
        by_step = {record.step: record for record in records}
        point = await self._rank.retry_storage(partial(self._find, committed, by_step, fence), what)
        for difference in point.differing:
            place = await self._rank.retry_storage(partial(self._set_aside, difference, fence), what)
            now = f"is now {place}" if place else "stays in place, because a learner of no older epoch wrote it"
            text = f"step {difference.step}: {difference.what}; the file is not used and {now}"
            await service.event_log.write("archive-differs", text)
        if point.missing:
            raise MissingBatchesError(service.record.id, point)
        await self._rank.retry_storage(partial(self._rank.checkpoints.set_aside, point.skipped, fence), what)
        return point

    def _find(self, committed: int, records: Mapping[int, StepRecord], fence: Fence) -> StartPoint:
        checkpoints = self._rank.checkpoints
        for name in checkpoints.clear_interrupted(fence):
            log.info("deleted %s", name)
        return find_start_point(self._rank.archive, checkpoints, committed, records)

    def _set_aside(self, difference: Difference, fence: Fence) -> str:
        """The place of a file that differs, once it is set aside; '' if the owner of `fence` may not."""
        archive, checkpoints = self._rank.archive, self._rank.checkpoints
        if difference.writer is None:
            names = checkpoints.set_aside([difference.checkpoint], fence, DIFFERS)
            return archive.mirror.location(f"{CHECKPOINTS}/{names[0]}", archive.folder) if names else ""
        return archive.set_aside(difference.step, difference.writer, fence)

    async def restore(self, name: str) -> None:
        """Load the checkpoint of that name. Collective. Raises ArchiveError."""
        checkpoints = self._rank.checkpoints
        with self._rank.waiting("recovery", f"all ranks to fetch and load checkpoint {name}"):
            await self._on_all_ranks(partial(checkpoints.stored.fetch, name), f"checkpoint {name}")
            await self._rank.in_order(lambda: checkpoints.load(self._rank.trainer, name))

    async def _on_all_ranks(self, operation: Callable[[], None], what: str) -> None:
        """Run an operation, as long as each rank needs; exchanges keep the group from timing out. Collective."""
        working = asyncio.ensure_future(self._rank.retry_storage(operation, what))
        busy, failed = 1, 0
        try:
            while busy:
                await asyncio.wait({working}, timeout=EXCHANGE_S)
                broken = working.done() and working.exception() is not None
                flags = torch.tensor([int(not working.done()), int(broken)])
                busy, failed = (await self._rank.in_order(partial(self._rank.ranks.all_reduce, flags))).tolist()
        finally:
            working.cancel()
        working.result()
        if failed:
            raise RuntimeError(f"{failed} other ranks could not fetch {what}")

    async def delete_after(self, step: int, records: Sequence[StepRecord], fence: Fence) -> None:
        """Delete the checkpoints, batches and records of steps after `step`, once the policy is restored.

        Also writes those of `records` (the steps in the run's history) that a previous learner did not write, and those
        whose file is damaged; events report the latter.
        """
        with self._rank.waiting("forgetting", f"the files of steps after {step} to be deleted"):
            deletion = partial(self._delete_after, step, records, fence)
            faults = await self._rank.retry_storage(deletion, f"deleting the files of steps after {step}")
        for fault in faults:
            await self._rank.service.event_log.write("archive-differs", f"{fault}; the record of Redis replaces it")

    def _delete_after(self, step: int, records: Sequence[StepRecord], fence: Fence) -> list[str]:
        """What was wrong with records that had to be written again."""
        archive = self._rank.archive
        for name in self._rank.checkpoints.delete_after(step, fence):
            log.info("deleted %s", name)
        archive.delete_after(step, fence, {record.step: record.fence for record in records})
        outdated = archive.outdated_records(records)
        for record, _ in outdated:
            archive.write_record(record)
        return [fault for _, fault in outdated if fault]
