"""Owns how one rank writes its file of a checkpoint in the background, and how rank 0 commits the checkpoint.

Must not decide when to write a checkpoint; it only computes when the recipe's interval makes one due.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from learner.checkpoint.manifest import Checkpoint, CheckpointError, CheckpointHeader, ConsumedGroups
from learner.rank.context import RankContext
from learner.training.tensor_files import HostBlock
from services.contracts import Fence

log = logging.getLogger(__name__)


class CheckpointWriter:
    """The checkpoints that one rank writes, one at a time. The writing itself does not use the training thread."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._closing = threading.Event()
        self._saving: tuple[str, asyncio.Future[None]] | None = None

    @property
    def wanted(self) -> bool:
        """Whether this run writes checkpoints."""
        return self._rank.settings.checkpoint_every > 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return self.wanted and step % self._rank.settings.checkpoint_every == 0

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written; on rank 0 until `commit` has ended."""
        return self._saving is not None

    async def save(self, step: int, fence: Fence) -> None:
        """Copy this rank's state and start writing it while training continues. Collective; rank 0 then commits.

        `fence`: of rank 0. Rank 0 must not be `saving`; there, raises CheckpointError if nothing can be written.
        """
        if self._rank.rank == 0 and self._saving is not None:
            raise RuntimeError(f"step {step} cannot be saved while {self._saving[0]} is being written")
        with self._rank.waiting("checkpoint-copy", f"all ranks to copy their state after rollout step {step}"):
            captured = await self._rank.in_order(lambda: self._capture(step, fence))
        if captured is None:
            return
        name, state, other_node = captured
        write = partial(
            self._rank.checkpoints.partial.write, name, self._rank.rank, state, self._closing, on_other_node=other_node
        )
        writing = asyncio.get_running_loop().run_in_executor(self._thread, write)
        self._saving = name, writing
        if self._rank.rank:
            writing.add_done_callback(self._written)

    def _capture(self, step: int, fence: Fence) -> tuple[str, HostBlock, bool] | None:
        """(the checkpoint's name, the copied state, whether rank 0 is on another node); None if rank 0 failed."""
        rank, started, failure = self._rank, "", None
        if rank.rank == 0:
            try:
                started = rank.checkpoints.partial.start(step, fence)
            except CheckpointError as error:
                failure = error
        # The other ranks wait for a name, so rank 0 sends an empty one if it failed.
        name = rank.ranks.broadcast_bytes(None if rank.rank else started.encode()).decode()
        if failure:
            raise failure
        other_node = bool(name) and rank.rank > 0 and rank.checkpoints.partial.started_on_other_node(name)
        return (name, rank.trainer.capture(), other_node) if name else None

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._saving = None
        if not writing.cancelled() and (error := writing.exception()):
            log.warning("rank %d: %s", self._rank.rank, error)

    async def commit(
        self,
        step: int,
        version: int,
        fence: Fence,
        *,
        weights: str = "",
        saved_weights: str = "",
        sampler: str | None = None,
        consumed: ConsumedGroups | None = None,
    ) -> Checkpoint:
        """Wait for the files of all ranks and commit the checkpoint. Rank 0, after `save`.

        It does not use the training thread. `version`, `weights`, `saved_weights`: see CheckpointHeader; `sampler` and
        `consumed`: see Checkpoints.commit. Raises CheckpointError, after which the next `save` is possible.
        """
        assert self._saving is not None, "save() comes first"
        name, writing = self._saving
        settings = self._rank.settings
        header = CheckpointHeader(
            step=step,
            version=version,
            ranks=self._rank.world,
            zero_stage=settings.zero_stage,
            dtype=settings.dtype,
            weights=weights,
            saved_weights=saved_weights,
            epoch=fence.epoch,
            owner=fence.owner,
        )
        try:
            await writing
            commit = partial(self._rank.checkpoints.commit, sampler=sampler, consumed=consumed)
            checkpoint = await asyncio.to_thread(commit, name, header, self._closing)
        except CheckpointError:
            await asyncio.to_thread(self._rank.checkpoints.partial.abandon, name)
            self._saving = None
            raise
        self._saving = None
        return checkpoint

    async def prune(self, step: int, fence: Fence, weights: Mapping[int, str] = {}) -> None:
        """Delete what the checkpoint of `step` replaces, as far as the owner of `fence` may.

        `weights`: the digests of the committed weights, by step.
        """
        kept = self._rank.settings.checkpoints_kept
        prune = partial(self._rank.checkpoints.prune, kept, step, fence, weights)
        try:
            await asyncio.to_thread(prune)
        except OSError as error:
            log.warning("older checkpoints could not be deleted; the next commit retries: %s", error)

    def stop(self) -> None:
        """Make the write in progress fail soon."""
        self._closing.set()

    async def close(self) -> None:
        """Wait until the write has ended, and delete what it left. Call `stop` first."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._saving is not None and self._rank.rank == 0:
            await asyncio.to_thread(self._rank.checkpoints.partial.abandon, self._saving[0])
