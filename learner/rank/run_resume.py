"""Owns how one rank resumes a run: open the archive, find the start point, load its checkpoint, delete newer files.

Must not train. Rank 0 calls every method; the other ranks call only `restore`, which is collective.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata

import torch

from learner.archive import RunFacts
from learner.rank.context import RankContext
from learner.recovery.repair import repair_batches
from learner.recovery.start import MissingBatchesError, StartPoint, find_start_point
from services.contracts import StepRecord

log = logging.getLogger(__name__)

EXCHANGE_S = 2.0
"""Seconds between two exchanges of ranks that wait for each other's files."""
VERSIONS_OF = ("torch", "deepspeed", "transformers")


class RunResume:
    """The files of the run that one rank needs to resume it."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank

    async def open_archive(self, *, resumed: bool) -> None:
        """Fetch the run's archive from the store, if there is one, and write run.json.

        Raises ArchiveError if the archive holds another run and this one is not `resumed`.
        """
        record = self._rank.service.record
        facts = RunFacts(
            run=record.id,
            recipe=record.recipe,
            model_path=str(record.model_path),
            ranks=self._rank.world,
            device=self._rank.ranks.device.type,
            versions={name: metadata.version(name) for name in VERSIONS_OF},
        )
        await self._rank.retry_storage(partial(self._open_archive, facts, resumed), "the run's archive")

    def _open_archive(self, facts: RunFacts, resumed: bool) -> None:
        self._rank.archive.sync_with_store()
        self._rank.checkpoints.stored.fetch_manifests()
        self._rank.archive.start(facts, resumed=resumed)

    async def find_start_point(self, committed: int) -> StartPoint:
        """How to restore the policy of rollout step `committed`. Raises MissingBatchesError.

        Call it before the first save. Deletes what interrupted writes left, and sets damaged checkpoints aside. Repairs
        damaged or missing archived batches from Redis.
        """
        try:
            return await self._rank.retry_storage(partial(self._find, committed), "the run's checkpoints")
        except MissingBatchesError as error:
            service = self._rank.service
            repaired = await repair_batches(service.redis, service.keys, self._rank.archive, error.reasons)
            if not repaired:
                raise
            point = await self._rank.retry_storage(partial(self._find, committed), "the run's checkpoints")
            return replace(point, repaired={step: error.reasons[step] for step in repaired})

    def _find(self, committed: int) -> StartPoint:
        checkpoints = self._rank.checkpoints
        for name in checkpoints.clear_interrupted():
            log.info("deleted %s", name)
        point = find_start_point(self._rank.archive, checkpoints, committed)
        checkpoints.set_aside(point.skipped)
        return point

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

    async def delete_after(self, step: int, records: Sequence[StepRecord]) -> None:
        """Delete the checkpoints, batches and records of steps after `step`, once the policy is restored.

        Also writes those of `records` (the steps in the run's history) that a previous learner did not write.
        """
        with self._rank.waiting("forgetting", f"the files of steps after {step} to be deleted"):
            deletion = partial(self._delete_after, step, records)
            await self._rank.retry_storage(deletion, f"deleting the files of steps after {step}")

    def _delete_after(self, step: int, records: Sequence[StepRecord]) -> None:
        archive = self._rank.archive
        for name in self._rank.checkpoints.delete_after(step):
            log.info("deleted %s", name)
        archive.delete_after(step)
        for record in records:
            if archive.record(record.step) != record:
                archive.write_record(record)
