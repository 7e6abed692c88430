"""Owns one learner rank: open the model and the process group, copy the policy, exchange commands, close.

Must not read a stream, publish a version or commit a step; rank 0's coordinator does.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from learner.model.memory import check_memory
from learner.model.shape import folder_shape
from learner.rank.batch_training import BatchTraining
from learner.rank.checkpoint_writer import CheckpointWriter
from learner.rank.commands import Command
from learner.rank.context import RankContext
from learner.rank.run_resume import RunResume
from learner.storage_retry import retry_storage
from learner.training.process_group import Ranks, keep_freed_memory, nccl_failure_policy
from learner.training.trainer import Trainer, leave
from learner.weight_sync.snapshot import Snapshot, make_manifest, take_snapshot
from services.contracts import WeightManifest
from services.contracts.weight_group import nccl_environment
from services.process.hosting import Context
from services.storage.models import local_model, models_folder

UNPUBLISHED = -1
"""The version of a snapshot that is not published yet."""


class RankWorker:
    """One of `world` ranks, with its training, its checkpoint writer, and the files that it resumes from."""

    manifest: WeightManifest
    model_folder: Path

    def __init__(self, context: Context, rank: int, world: int, master: tuple[str, int]) -> None:
        self._context = context
        self._master = master
        self._other_stops = False
        self._rank = RankContext(context, rank, world)
        self.archive = self._rank.archive
        self.checkpoints = self._rank.checkpoints
        self.training = BatchTraining(self._rank)
        self.checkpoint_writer = CheckpointWriter(self._rank)
        self.resume = RunResume(self._rank)

    async def open(self) -> None:
        """Fetch the model to this node, join the ranks and load the policy. Collective."""
        record = self._context.record
        if record.model_path is None:
            raise RuntimeError(f"run {record.id!r} has no model_path: a rank must wait for it before it opens")
        patience_s = record.recipe.limits.startup_timeout_s
        with self._context.waits.on("model", "the model to be on this node", patience_s):
            fetch = partial(local_model, record.model_path, models_folder())
            self.model_folder = await retry_storage(fetch, "the model", self._context.waits, patience_s)
        await self._rank.retry_storage(self.archive.clear_scratch, "the files of an earlier learner on this node")
        await self._rank.in_order(self._open)

    def _open(self) -> None:
        rank, recipe = self._rank, self._context.record.recipe
        keep_freed_memory()
        os.environ.update(nccl_failure_policy(rank.timeout_s) | nccl_environment(recipe.weights.timeout_s))
        # A rank whose node already has the model waits here for ranks that are still fetching it.
        meet_s = recipe.limits.startup_timeout_s
        rank.ranks = Ranks(rank.rank, rank.world, *self._master, timeout_s=rank.timeout_s, meet_s=meet_s)
        if shape := folder_shape(self.model_folder):
            check_memory(recipe, shape, rank.ranks.device)
        rank.trainer = Trainer(self.model_folder, recipe, rank.ranks)
        self.manifest = make_manifest(rank.trainer, recipe.weights.bucket_mib)
        self.archive.prepare()

    async def close(self) -> None:
        """Abandon the checkpoint in progress, release the engine and leave the ranks, even if `open` failed."""
        self.checkpoint_writer.stop()
        await self._rank.in_order(self._close)
        self._rank.close()
        await self.checkpoint_writer.close()

    def _close(self) -> None:
        if hasattr(self._rank, "trainer"):
            self._rank.trainer.close()
        if hasattr(self._rank, "ranks"):
            leave(self._rank.ranks)

    @property
    def device(self) -> torch.device:
        """The device on which this rank trains."""
        return self._rank.ranks.device

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model in training."""
        return self._rank.trainer.causal_lm

    @property
    def stopping(self) -> bool:
        """Whether this rank is asked to stop, or another one was when rank 0 last sent `idle`."""
        return self._other_stops or self._context.stopping.is_set()

    @property
    def between_steps(self) -> bool:
        """Whether the state is that of the last rollout step, so that it can be saved."""
        return self._rank.trainer.between_steps

    async def send(self, command: Command) -> None:
        """Send a command to the other ranks, from rank 0. Collective with their `receive`.

        With `idle` each rank tells the others whether it is asked to stop: a node may be taken away from one alone.
        """
        if self._rank.world > 1:
            message = command.model_dump_json().encode()
            # One job: a caller that is cancelled between two would leave the other ranks in the second one.
            await self._rank.in_order(lambda: self._exchange(message))

    async def receive(self) -> Command:
        """The next command of rank 0, on every other rank. Raises RuntimeError if rank 0 is gone."""
        return await self._rank.in_order(lambda: self._exchange(None))

    def _exchange(self, message: bytes | None) -> Command:
        """On the training thread: rank 0's `message` to all ranks, then their stops if it is idle. Collective."""
        command = Command.model_validate_json(self._rank.ranks.broadcast_bytes(message))
        if command.do == "idle":
            flag = torch.tensor(int(self._context.stopping.is_set()))
            self._other_stops = bool(self._rank.ranks.all_reduce(flag))
        return command

    async def snapshot(self) -> Snapshot | None:
        """Copy the policy. Collective; only rank 0 keeps the copy, which is UNPUBLISHED."""
        rank, keep = self._rank, self._rank.rank == 0
        with rank.waiting("policy-copy", "all ranks to copy the policy"):
            return await rank.in_order(lambda: take_snapshot(rank.trainer, self.manifest, UNPUBLISHED, keep=keep))
