"""Owns what one rank does with its policy: train its share of a batch, hand out snapshots, write checkpoints.

Must not read a stream, publish a version or commit a step; the service does. Collectives and gradients belong to one
thread, so that their order is the same on every rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from learner.archive import RunArchive, RunFacts, run_folder
from learner.batches import MiniBatch
from learner.checkpoints import Checkpoint, Checkpoints
from learner.ranks import Ranks, keep_freed_memory
from learner.snapshot import Snapshot, make_manifest, take_snapshot
from learner.trainer import InterruptedTrainingError, Trained, Trainer, leave
from services.contracts import Batch, Value, WeightManifest
from services.shell import Context
from services.streams.payloads import SamplePayload, fetch

log = logging.getLogger(__name__)

R = TypeVar("R")

VERSIONS_OF = ("torch", "deepspeed", "transformers")


class Command(Value):
    """rank 0 -> all ranks: what to do next, together. `train` comes with a batch, `save` with a step."""

    do: Literal["idle", "train", "save", "stop"]
    batch: Batch | None = None
    step: int | None = None


class NonFiniteGradientError(RuntimeError):
    """Too many optimizer steps in a row had no finite gradient."""


class RankWork:
    """One rank's place among `world`. Methods named after a command are collective."""

    def __init__(self, context: Context, rank: int, world: int, master: tuple[str, int]) -> None:
        self._context = context
        self._settings = context.record.recipe.learner
        self._rank = rank
        self._world = world
        self._master = master
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learning")
        self._trainer: Trainer
        self._ranks: Ranks
        self.manifest: WeightManifest
        self.archive = RunArchive(run_folder(context.record.id))
        self._checkpoints = Checkpoints(self.archive)
        self.non_finite_in_a_row = 0
        """Optimizer steps without a finite gradient since the last one with, across rollout steps."""

    async def in_order(self, task: Callable[[], R]) -> R:
        """Run blocking `task` on the learning thread, between two collectives."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, task)

    async def open(self) -> None:
        """Join the ranks and load the policy. Collective."""
        await self.in_order(self._open)

    def _open(self) -> None:
        record = self._context.record
        if record.model_path is None:
            raise RuntimeError(f"run {record.id!r} has no model_path; the controller sets it before it starts services")
        keep_freed_memory()
        timeout_s = max(600.0, 4 * record.recipe.weights.timeout_s)
        self._ranks = Ranks(self._rank, self._world, *self._master, timeout_s=timeout_s)
        self._trainer = Trainer(Path(record.model_path), record.recipe, self._ranks)
        self.manifest = make_manifest(self._trainer, record.recipe.weights.bucket_mib)
        self.archive.prepare()

    async def close(self) -> None:
        """Let go of the engine and leave the ranks, however far `open` came."""
        await self.in_order(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if hasattr(self, "_trainer"):
            self._trainer.close()
        if hasattr(self, "_ranks"):
            leave(self._ranks)

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model in training."""
        return self._trainer.causal_lm

    async def begin_archive(self) -> None:
        """Note in the run's folder what is trained here; by rank 0. Raises ArchiveError if it holds another run."""
        record = self._context.record
        facts = RunFacts(
            run=record.id, recipe=record.recipe, model_path=str(record.model_path), ranks=self._world,
            device=self._ranks.device.type, versions={name: metadata.version(name) for name in VERSIONS_OF},
        )  # fmt: skip
        await asyncio.to_thread(self.archive.begin, facts)

    async def send(self, command: Command) -> None:
        """Rank 0 tells the others what comes next."""
        if self._world > 1:
            await self.in_order(lambda: self._ranks.broadcast_bytes(command.model_dump_json().encode()))

    async def receive(self) -> Command:
        """Every other rank hears it."""
        return Command.model_validate_json(await self.in_order(lambda: self._ranks.broadcast_bytes(None)))

    async def snapshot(self, version: int) -> Snapshot | None:
        """Copy the policy; only rank 0 keeps the copy. Collective."""
        keep = self._rank == 0
        return await self.in_order(lambda: take_snapshot(self._trainer, self.manifest, version, keep=keep))

    async def train(self, batch: Batch) -> Trained | None:
        """One rollout step; None when `stopping` was set meanwhile and cut the work short. Collective."""
        work = asyncio.ensure_future(self._train(batch))
        stopping = asyncio.create_task(self._context.stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                self._trainer.interrupt()
            return await work
        except InterruptedTrainingError:
            log.info("stopping: the batch is left to whoever comes next")
            return None
        finally:
            stopping.cancel()

    async def _train(self, batch: Batch) -> Trained:
        plans = self._trainer.plan(batch)
        payloads, error = await self._prepare(batch, plans)
        # Were one rank to stay away from training, the others would wait for it until the group's timeout.
        failures = await self.in_order(
            lambda: int(self._ranks.all_reduce(torch.tensor([int(error is not None)]), dist.ReduceOp.SUM))
        )
        if error:
            raise error
        if failures:
            raise RuntimeError(f"{failures} other ranks could not fetch or archive their share of step {batch.step}")
        trained = await self.in_order(lambda: self._trainer.train(plans, payloads))
        for step in trained.optimizer:
            self.non_finite_in_a_row = 0 if step.applied else self.non_finite_in_a_row + 1
            if self.non_finite_in_a_row == self._settings.max_non_finite_steps:
                break
        return trained

    async def _prepare(self, batch: Batch, plans: list[MiniBatch]) -> tuple[dict[str, SamplePayload], Exception | None]:
        """Fetch this rank's share and archive it, so that whatever training makes of it can be replayed."""
        keys = [one.payload for plan in plans for one in plan.shares[self._rank]]
        try:
            payloads = dict(zip(keys, await fetch(self._context.redis, keys), strict=True))
            await asyncio.to_thread(self._archive, batch, payloads)
        except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks must hear of it; it is raised then
            return {}, error
        return payloads, None

    def _archive(self, batch: Batch, payloads: dict[str, SamplePayload]) -> None:
        self.archive.write_share(batch, self._rank, payloads)
        if self._rank == 0:
            self.archive.write_batch(batch)

    def check_gradients(self, step: int) -> None:
        """Raise NonFiniteGradientError when the limit of steps in a row is reached; on every rank alike."""
        limit = self._settings.max_non_finite_steps
        if self.non_finite_in_a_row < limit:
            return
        raise NonFiniteGradientError(
            f"{limit} optimizer steps in a row had no finite gradient (learner.max_non_finite_steps), the last of them "
            f"in rollout step {step}; its batch is {self.archive.batch_path(step)}; "
            f"`penstock replay {self._context.record.id} {step} --runs {self.archive.folder.parent}` runs it again"
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step`."""
        every = self._settings.checkpoint_every
        return every > 0 and step % every == 0

    async def save(self, step: int) -> None:
        """Write this rank's part of a checkpoint. Collective; rank 0 then commits it."""
        await self.in_order(lambda: self._checkpoints.write(self._trainer, step, self._rank))

    async def commit_checkpoint(self, step: int, version: int) -> Checkpoint:
        """Make what all ranks wrote a checkpoint, and delete what it makes dispensable; by rank 0."""
        return await asyncio.to_thread(self._commit_checkpoint, step, version)

    def _commit_checkpoint(self, step: int, version: int) -> Checkpoint:
        checkpoint = self._checkpoints.commit(step, version, self._world, self._settings.zero_stage)
        self._checkpoints.prune(self._settings.checkpoints_kept)
        return checkpoint
