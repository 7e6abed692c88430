"""Owns the learner's life: batches in, policy versions out, from the initial weights to the export.

Reads the batches' stream and each rank's share of payloads; writes step records, the weight plans, the export.
Rank 0 leads: it alone reads the stream, publishes and commits; the others follow its commands. When a rank dies the
run cannot go on, for its optimizer state is lost: the others notice by the process group and fail too. A batch that
was not committed stays unacked, and no group is counted as trained.

Drain order: finish or abandon the micro-batch under way -> tell the other ranks to stop -> stop serving joiners ->
destroy the engine and the process group.

Must not import DeepSpeed; the trainer does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from learner.batches import MiniBatch
from learner.export import export, export_folder
from learner.ranks import Ranks, keep_freed_memory
from learner.snapshot import Snapshot, make_manifest, take_snapshot
from learner.trainer import InterruptedTrainingError, Trained, Trainer, leave
from learner.weights import Publisher
from services.contracts import Batch, StepRecord, Value, WeightManifest
from services.metrics import POLICY_VERSION, STEP
from services.shell import Context
from services.streams.effects import Effects
from services.streams.leases import Consumer, Delivery
from services.streams.payloads import PayloadMissingError, SamplePayload, fetch
from services.streams.records import RunRecords

log = logging.getLogger(__name__)

R = TypeVar("R")

TICK_S = 4.0
"""Seconds within which rank 0 sends the other ranks a command, be it an idle one."""


class Command(Value):
    """rank 0 -> all ranks: what to do next, together."""

    do: Literal["idle", "train", "stop"]
    batch: Batch | None = None


class LearnerService:
    """One rank of a run's learner. Ranks above 0 need rank 0's address, and `master_port` free there."""

    name = "learner"

    def __init__(self, rank: int = 0, world: int = 1, master_host: str = "127.0.0.1", master_port: int = 0) -> None:
        self._rank = rank
        self._world = world
        self._master = (master_host, master_port)
        self._manifest: WeightManifest
        self._trainer: Trainer
        self._ranks: Ranks
        self._version = 0

    async def run(self, context: Context) -> None:
        """Train until the run's rollout steps are done, then serve joiners until `stopping`. See the drain order."""
        self._context = context
        # Collectives and gradients belong to one thread, so that their order is the same on every rank.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="learning")
        await context.presence.update(state="starting")
        try:
            await context.journal.event("starting", f"rank {self._rank} of {self._world} loads the policy")
            await self._work(self._open)
            await (self._lead() if self._rank == 0 else self._follow())
        finally:
            await self._work(self._close)
            self._worker.shutdown()

    async def _work(self, task: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)

    def _open(self) -> None:
        record = self._context.record
        if record.model_path is None:
            raise RuntimeError(f"run {record.id!r} has no model_path; the controller sets it before it starts services")
        keep_freed_memory()
        timeout_s = max(600.0, 4 * record.recipe.weights.timeout_s)
        self._ranks = Ranks(self._rank, self._world, *self._master, timeout_s=timeout_s)
        self._trainer = Trainer(Path(record.model_path), record.recipe, self._ranks)
        self._manifest = make_manifest(self._trainer, record.recipe.weights.bucket_mib)

    def _close(self) -> None:
        if hasattr(self, "_trainer"):
            self._trainer.close()
        if hasattr(self, "_ranks"):
            leave(self._ranks)

    async def _lead(self) -> None:
        context, recipe = self._context, self._context.record.recipe
        committed = await context.journal.policy_version()
        if committed:
            raise RuntimeError(
                f"run {context.record.id!r} is at policy version {committed}, whose weights died with its learner; "
                "submit it anew"
            )
        self._effects = await Effects.fenced(context.redis, context.keys, self.name)
        self._publisher = Publisher(
            context.redis, context.keys, context.journal, recipe.weights, context.host, self._effects.epoch
        )
        self._consumer: Consumer[Batch] = Consumer(
            context.redis, context.keys, context.keys.batches, "learner", context.presence.info.id, Batch,
            recipe.limits.lease_s, recipe.limits.max_deliveries,
        )  # fmt: skip
        await self._consumer.open()
        await self._publisher.open(self._manifest)
        try:
            await self._publish(await self._snapshot(0))
            await context.presence.update(state="ready", version=0)
            await context.journal.event("ready", "learner ready; policy version 0 is served")
            await self._train_all(recipe.limits.rollout_steps)
            await self._serve_joiners()
            # After a failure nothing is sent: another rank may be inside a different collective. It notices us leave.
            await self._command(Command(do="stop"))
        finally:
            await self._publisher.close()

    async def _train_all(self, rollout_steps: int) -> None:
        while self._version < rollout_steps and not self._context.stopping.is_set():
            self._publisher.check()
            deliveries = await self._consumer.read(1, TICK_S if self._world > 1 else 1.0)
            if not deliveries:
                await self._command(Command(do="idle"))
            for delivery in deliveries:
                await self._handle(delivery)
        if self._version >= rollout_steps:
            await self._export()

    async def _handle(self, delivery: Delivery[Batch]) -> None:
        batch = delivery.message
        if batch.version < self._version:
            log.warning("step %d was trained before; its batch is acked without work", batch.step)
            await self._consumer.ack(delivery.lease)
            return
        if batch.version > self._version:
            raise RuntimeError(
                f"batch {batch.step} is for policy version {batch.version}, but {self._version} is current"
            )
        async with self._consumer.renewing(delivery.lease):
            started_at = time.time()
            trained = await self._interruptible(self._learn(batch))
            if trained is None:
                return
            finished_at = time.time()
            snapshot = await self._snapshot(batch.version + 1)
            seconds = await self._publish(snapshot)
            record = StepRecord(
                step=batch.step, version=batch.version + 1, optimizer_steps=trained.optimizer_steps,
                groups=tuple(group.group for group in batch.groups),
                metrics=batch.sampling_metrics | trained.metrics | {"publish_seconds": seconds},
                generation_started_at=batch.generation_started_at,
                generation_finished_at=batch.generation_finished_at,
                learning_started_at=started_at, learning_finished_at=finished_at,
            )  # fmt: skip
            await self._effects.commit_step(delivery.lease, batch, record)
        await self._committed(record, trained)

    async def _committed(self, record: StepRecord, trained: Trained) -> None:
        self._version = record.version
        await self._context.presence.update(version=record.version)
        for name, value in record.metrics.items():
            STEP.labels(run=self._context.record.id, name=name).set(value)
        if trained.skipped:
            text = f"step {record.step}: {trained.skipped} optimizer steps skipped, their gradient was not finite"
            await self._context.journal.event("non-finite-gradient", text)

    async def _interruptible(self, learning: Awaitable[Trained]) -> Trained | None:
        """The result; or None when `stopping` was set meanwhile and cut the work short."""
        work = asyncio.ensure_future(learning)
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

    async def _learn(self, batch: Batch) -> Trained:
        """Train one batch; on rank 0, together with the others."""
        await self._command(Command(do="train", batch=batch))
        return await self._train_share(batch)

    async def _train_share(self, batch: Batch) -> Trained:
        plans = self._trainer.plan(batch)
        payloads, error = await self._fetch_share(plans)
        # Were one rank to stay away from training, the others would wait for it until the group's timeout.
        failures = await self._work(
            lambda: int(self._ranks.all_reduce(torch.tensor([int(error is not None)]), dist.ReduceOp.SUM))
        )
        if error:
            raise error
        if failures:
            raise RuntimeError(f"{failures} other ranks could not fetch their share of step {batch.step}")
        return await self._work(lambda: self._trainer.train(plans, payloads))

    async def _fetch_share(self, plans: list[MiniBatch]) -> tuple[dict[str, SamplePayload], PayloadMissingError | None]:
        keys = [one.payload for plan in plans for one in plan.shares[self._rank]]
        try:
            found = await fetch(self._context.redis, keys)
        except PayloadMissingError as error:
            return {}, error
        return dict(zip(keys, found, strict=True)), None

    async def _snapshot(self, version: int) -> Snapshot:
        snapshot = await self._work(lambda: take_snapshot(self._trainer, self._manifest, version, keep=True))
        assert snapshot is not None, "rank 0 keeps it"
        self._last = snapshot
        return snapshot

    async def _publish(self, snapshot: Snapshot) -> float:
        publishing = asyncio.create_task(self._publisher.publish(snapshot))
        while not (await asyncio.wait({publishing}, timeout=TICK_S))[0]:
            await self._command(Command(do="idle"))
        POLICY_VERSION.labels(run=self._context.record.id, service=self.name).set(snapshot.version)
        return publishing.result()

    async def _export(self) -> None:
        run = self._context.record.id
        source = Path(str(self._context.record.model_path))
        folder = await self._work(lambda: export(self._trainer.causal_lm, self._last, source, export_folder(run)))
        await RunRecords(self._context.redis).set_paths(run, export_path=str(folder))
        await self._context.journal.event("exported", f"policy version {self._version} is in {folder}")

    async def _serve_joiners(self) -> None:
        """Nothing is left to learn; replicas may still join, for evaluation needs them."""
        while not self._context.stopping.is_set():
            try:
                await asyncio.wait_for(self._context.stopping.wait(), TICK_S)
            except TimeoutError:
                self._publisher.check()
                await self._command(Command(do="idle"))

    async def _command(self, command: Command) -> None:
        if self._world > 1:
            await self._work(lambda: self._ranks.broadcast_bytes(command.model_dump_json().encode()))

    async def _follow(self) -> None:
        await self._work(lambda: take_snapshot(self._trainer, self._manifest, 0, keep=False))
        await self._context.presence.update(state="ready", version=0)
        while True:
            command = Command.model_validate_json(await self._work(lambda: self._ranks.broadcast_bytes(None)))
            if command.do == "stop":
                return
            if command.batch is not None:
                await self._follow_batch(command.batch)

    async def _follow_batch(self, batch: Batch) -> None:
        if await self._interruptible(self._train_share(batch)) is None:
            return
        self._version = batch.version + 1
        await self._work(lambda: take_snapshot(self._trainer, self._manifest, self._version, keep=False))
        await self._context.presence.update(version=self._version)
