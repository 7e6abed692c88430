"""Owns what one rank does with its policy: train its share of a batch, hand out snapshots, write checkpoints.

Must not read a stream, publish a version or commit a step; the service does. Collectives and gradients belong to one
thread, so that their order is the same on every rank.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from learner.archive import RunArchive, RunFacts, run_folder
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint, CheckpointError, Consumed, Cut
from learner.rank.commands import Command
from learner.recovery.repair import repair
from learner.recovery.start import MissingBatchesError, Recovery, archived_payloads, recover
from learner.storage_retry import written
from learner.training.minibatches import masked
from learner.training.process_group import Ranks, keep_freed_memory
from learner.training.tensor_files import HostBlock
from learner.training.trainer import InterruptedTrainingError, Trained, Trainer, leave
from learner.weight_sync.snapshot import Snapshot, make_manifest, take_snapshot
from services.contracts import Batch, StepRecord, WeightManifest
from services.process import Context
from services.storage.mirror import run_mirror
from services.storage.models import local_model, models_folder
from services.streams.delivery.payloads import SamplePayload, fetch

log = logging.getLogger(__name__)

R = TypeVar("R")

UNPUBLISHED = -1
TOGETHER_S = 2.0
VERSIONS_OF = ("torch", "deepspeed", "transformers")


class NonFiniteGradientError(RuntimeError):
    """Too many optimizer steps in a row had no finite gradient."""


class RankWork:
    """One rank's place among `world`. Methods named after a command are collective."""

    def __init__(self, context: Context, rank: int, world: int, master: tuple[str, int]) -> None:
        self._context = context
        self._settings = context.record.recipe.learner
        self._timeout_s = max(600.0, 4 * context.record.recipe.weights.timeout_s)
        self._rank = rank
        self._world = world
        self._master = master
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learning")
        self._trainer: Trainer
        self._ranks: Ranks
        self.manifest: WeightManifest
        self.archive = RunArchive(run_folder(context.record.id), run_mirror(context.record.id))
        self.checkpoints = Checkpoints(self.archive)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ending = threading.Event()
        self._saving: tuple[str, asyncio.Future[None]] | None = None
        self.model_folder: Path

    async def in_order(self, task: Callable[[], R]) -> R:
        """Run blocking `task` on the learning thread, between two collectives."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, task)

    def _waiting(self, name: str, what: str) -> AbstractContextManager[None]:
        return self._context.waits.on(name, what, self._context.record.recipe.limits.stall_timeout_s)

    async def open(self) -> None:
        """Have the model on this node, join the ranks and load the policy. Collective."""
        record = self._context.record
        if record.model_path is None:
            raise RuntimeError(f"run {record.id!r} has no model_path; the controller sets it before it starts services")
        patience_s = record.recipe.limits.startup_timeout_s
        with self._context.waits.on("model", "the model to be on this node", patience_s):
            bringing = partial(local_model, record.model_path, models_folder())
            self.model_folder = await written(bringing, "the model", self._context.waits, patience_s)
        await self._durably(self.archive.forget_scratch, "what an earlier learner left here")
        await self.in_order(self._open)

    def _open(self) -> None:
        record = self._context.record
        keep_freed_memory()
        # A rank whose node has the model already waits here for the one that is still fetching it.
        meet_s = record.recipe.limits.startup_timeout_s
        self._ranks = Ranks(self._rank, self._world, *self._master, timeout_s=self._timeout_s, meet_s=meet_s)
        self._trainer = Trainer(self.model_folder, record.recipe, self._ranks)
        self.manifest = make_manifest(self._trainer, record.recipe.weights.bucket_mib)
        self.archive.prepare()

    async def close(self) -> None:
        """Let go of the engine and leave the ranks, however far `open` came. What is being written is given up."""
        self._ending.set()
        await self.in_order(self._close)
        self._thread.shutdown()
        await asyncio.to_thread(self._writer.shutdown)
        if self._saving is not None and self._rank == 0:
            await asyncio.to_thread(self.checkpoints.abandon, self._saving[0])

    def _close(self) -> None:
        if hasattr(self, "_trainer"):
            self._trainer.close()
        if hasattr(self, "_ranks"):
            leave(self._ranks)

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model in training."""
        return self._trainer.causal_lm

    async def begin_archive(self, *, resumed: bool) -> None:
        """Note in the run's folder what is trained here; by rank 0.

        Raises ArchiveError if it holds another run and this one is not `resumed`.
        """
        record = self._context.record
        facts = RunFacts(
            run=record.id, recipe=record.recipe, model_path=str(record.model_path), ranks=self._world,
            device=self._ranks.device.type, versions={name: metadata.version(name) for name in VERSIONS_OF},
        )  # fmt: skip
        await self._durably(partial(self._begin_archive, facts, resumed), "the run's archive")

    def _begin_archive(self, facts: RunFacts, resumed: bool) -> None:
        self.archive.take_in()
        self.checkpoints.stored.take_in()
        self.archive.begin(facts, resumed=resumed)

    async def _durably(self, do: Callable[[], R], what: str) -> R:
        """Do something that needs the disk or the store, and wait for them as long as the other ranks wait for us."""
        patience_s = min(self._context.record.recipe.limits.stall_timeout_s, self._timeout_s / 2)
        return await written(do, what, self._context.waits, patience_s)

    async def send(self, command: Command) -> None:
        """Rank 0 tells the others what comes next."""
        if self._world > 1:
            await self.in_order(lambda: self._ranks.broadcast_bytes(command.model_dump_json().encode()))

    async def receive(self) -> Command:
        """Every other rank hears it."""
        return Command.model_validate_json(await self.in_order(lambda: self._ranks.broadcast_bytes(None)))

    async def snapshot(self) -> Snapshot | None:
        """Copy the policy; only rank 0 keeps the copy, which has no version yet. Collective."""
        keep = self._rank == 0
        with self._waiting("policy-copy", "all ranks to copy the policy"):
            return await self.in_order(lambda: take_snapshot(self._trainer, self.manifest, UNPUBLISHED, keep=keep))

    async def train(self, batch: Batch, *, archived: bool = False) -> Trained | None:
        """One rollout step; None when `stopping` was set meanwhile and cut the work short. Collective.

        With `archived` its payloads come from the archive, which training it the first time left.
        """
        work = asyncio.ensure_future(self._train(batch, archived))
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

    async def _train(self, batch: Batch, archived: bool) -> Trained:
        damaged: dict[str, str] = {}
        while True:
            plans = self._trainer.plan(batch)
            keys = [one.payload for plan in plans for one in plan.shares[self._rank]]
            payloads, found, error = await self._payloads(batch, keys, archived)
            places = await self._exchange(batch, found, error)
            if not places:
                break
            # What one rank cannot train all ranks leave out, for they agree on every token's weight.
            damaged |= {key: found.get(key, f"payload {key} is damaged") for key in places}
            batch = masked(batch, places)
        error = None if archived else await self._archived(batch, payloads)
        await self._exchange(batch, {}, error)
        trained = await self.in_order(lambda: self._trainer.train(plans, payloads))
        return replace(trained, damaged=tuple(damaged.values()))

    async def _payloads(
        self, batch: Batch, keys: list[str], archived: bool
    ) -> tuple[dict[str, SamplePayload], dict[str, str], Exception | None]:
        """This rank's share: the payloads that are whole, why others are not, and what else went wrong."""
        try:
            if archived:
                what = f"the archived batch of rollout step {batch.step}"
                found = await self._durably(partial(archived_payloads, self.archive, batch), what)
                return {key: found[key] for key in keys}, {}, None
            whole, damaged = await fetch(self._context.redis, keys)
        except Exception as error:  # noqa: BLE001 - whatever it was, the other ranks must hear of it; it is raised then
            return {}, {}, error
        return whole, damaged, None

    async def _exchange(self, batch: Batch, damaged: Mapping[str, str], error: Exception | None) -> list[str]:
        """The payloads that any rank found damaged. Collective. Raises `error`, RuntimeError for another rank's.

        Were one rank to stay away from training, the others would wait for it until the group's timeout.
        """
        keys = [sample.payload for group in batch.groups for sample in group.samples]
        flags = torch.tensor([int(error is not None), *(int(key in damaged) for key in keys)])
        failures, *found = (await self.in_order(lambda: self._ranks.all_reduce(flags))).tolist()
        if error:
            raise error
        if failures:
            raise RuntimeError(f"{failures} other ranks could not fetch or archive their share of step {batch.step}")
        return [key for key, count in zip(keys, found, strict=True) if count]

    async def _archived(self, batch: Batch, payloads: dict[str, SamplePayload]) -> Exception | None:
        """Archive the batch and this rank's share, so that whatever training makes of it can be replayed."""
        try:
            await self._durably(partial(self._archive, batch, payloads), f"the batch of rollout step {batch.step}")
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None

    def _archive(self, batch: Batch, payloads: dict[str, SamplePayload]) -> None:
        self.archive.write_share(batch, self._rank, payloads)
        if self._rank == 0:
            self.archive.write_batch(batch)
        elif self.archive.mirror.remote:
            self.archive.share_path(batch.step, self._rank).unlink()  # nobody else clears up this node's scratch

    @property
    def non_finite_in_a_row(self) -> int:
        """Optimizer steps without a finite gradient since the last one with, across rollout steps."""
        return self._trainer.non_finite_in_a_row

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

    @property
    def checkpoints_wanted(self) -> bool:
        """Whether this run writes any."""
        return self._settings.checkpoint_every > 0

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written: on rank 0 until `commit_checkpoint` is done with it."""
        return self._saving is not None

    async def save(self, step: int) -> None:
        """Copy this rank's state, and begin to write it while training goes on. Collective; rank 0 then commits it.

        Rank 0 calls it while none is `saving`. There it raises CheckpointError if nothing can be written.
        """
        if self._rank == 0 and self._saving is not None:
            raise RuntimeError(f"step {step} cannot be saved while {self._saving[0]} is being written")
        with self._waiting("checkpoint-copy", f"all ranks to copy their state after rollout step {step}"):
            captured = await self.in_order(lambda: self._capture(step))
        if captured is None:
            return
        name, state, elsewhere = captured
        write = partial(self.checkpoints.write, name, self._rank, state, self._ending, elsewhere=elsewhere)
        writing = asyncio.get_running_loop().run_in_executor(self._writer, write)
        self._saving = name, writing
        if self._rank:
            writing.add_done_callback(self._written)

    def _capture(self, step: int) -> tuple[str, HostBlock, bool] | None:
        begun, failure = "", None
        if self._rank == 0:
            try:
                begun = self.checkpoints.begin(step)
            except CheckpointError as error:
                failure = error
        # The others are waiting for a name, be it none.
        name = self._ranks.broadcast_bytes(None if self._rank else begun.encode()).decode()
        if failure:
            raise failure
        elsewhere = bool(name) and self._rank > 0 and self.checkpoints.elsewhere(name)
        return (name, self._trainer.capture(), elsewhere) if name else None

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._saving = None
        if not writing.cancelled() and (error := writing.exception()):
            log.warning("rank %d: %s", self._rank, error)

    async def commit_checkpoint(
        self, step: int, version: int, *, weights: str = "", sampler: str | None = None,
        consumed: Consumed | None = None,
    ) -> Checkpoint:  # fmt: skip
        """Make what all ranks write a checkpoint, and delete what it makes dispensable; by rank 0, after `save`.

        Nothing of it needs the learning thread. `weights`: the digest of those published as `version`; `sampler`
        and `consumed`: see Checkpoints. Raises CheckpointError, after which the next may be saved.
        """
        assert self._saving is not None, "rank 0 has saved"
        name, writing = self._saving
        cut = Cut(
            step=step, version=version, ranks=self._world, zero_stage=self._settings.zero_stage,
            dtype=self._settings.dtype, weights=weights,
        )  # fmt: skip
        try:
            await writing
            checkpoint = await asyncio.to_thread(self._commit_checkpoint, name, cut, sampler, consumed)
        except CheckpointError:
            await asyncio.to_thread(self.checkpoints.abandon, name)
            self._saving = None
            raise
        self._saving = None
        return checkpoint

    def _commit_checkpoint(self, name: str, cut: Cut, sampler: str | None, consumed: Consumed | None) -> Checkpoint:
        checkpoint = self.checkpoints.commit(name, cut, self._ending, sampler=sampler, consumed=consumed)
        try:
            self.checkpoints.prune(self._settings.checkpoints_kept)
        except OSError as error:
            log.warning("older checkpoints stay until the next is written: %s", error)
        return checkpoint

    async def recover(self, committed: int) -> Recovery:
        """How to come back to rollout step `committed`; by rank 0, before it saves. Raises MissingBatchesError.

        Deletes what interrupted writes left, and sets damaged checkpoints aside. `repaired`: the steps whose batches
        Redis had to be asked for, since the archive does not hold them whole.
        """
        try:
            return await self._durably(partial(self._recover, committed), "the run's checkpoints")
        except MissingBatchesError as error:
            repaired = await repair(self._context.redis, self._context.keys, self.archive, error.reasons)
            if not repaired:
                raise
            recovery = await self._durably(partial(self._recover, committed), "the run's checkpoints")
            return replace(recovery, repaired={step: error.reasons[step] for step in repaired})

    async def forget_after(self, step: int, records: Sequence[StepRecord]) -> None:
        """Delete what the archive has of steps behind `step`, once the way back to it is behind us; by rank 0.

        Writes those of `records`, the surviving history, that a learner had no time to write.
        """
        with self._waiting("forgetting", f"files of steps behind {step} to be deleted"):
            await self._durably(partial(self._forget_after, step, records), f"deleting what is behind step {step}")

    def _forget_after(self, step: int, records: Sequence[StepRecord]) -> None:
        for name in self.checkpoints.discard_after(step):
            log.info("deleted %s", name)
        self.archive.forget_after(step)
        for record in records:
            if self.archive.record(record.step) != record:
                self.archive.write_record(record)

    def _recover(self, committed: int) -> Recovery:
        for name in self.checkpoints.clear():
            log.info("deleted %s", name)
        recovery = recover(self.archive, self.checkpoints, committed)
        self.checkpoints.set_aside(recovery.passed_over)
        return recovery

    async def _together(self, do: Callable[[], None], what: str) -> None:
        """Have every rank do what may take each another time, without any being taken for lost. Collective."""
        doing = asyncio.ensure_future(self._durably(do, what))
        busy, failed = 1, 0
        try:
            while busy:
                await asyncio.wait({doing}, timeout=TOGETHER_S)
                broken = doing.done() and doing.exception() is not None
                flags = torch.tensor([int(not doing.done()), int(broken)])
                busy, failed = (await self.in_order(partial(self._ranks.all_reduce, flags))).tolist()
        finally:
            doing.cancel()
        doing.result()
        if failed:
            raise RuntimeError(f"{failed} other ranks could not fetch {what}")

    async def restore(self, name: str) -> None:
        """Go on from the checkpoint of that name. Collective. Raises ArchiveError."""
        with self._waiting("recovery", f"all ranks to have and load checkpoint {name}"):
            await self._together(partial(self.checkpoints.stored.fetch, name), f"checkpoint {name}")
            await self.in_order(lambda: self.checkpoints.load(self._trainer, name))
