"""Owns a learner without weights: the real History, archive and checkpoints around steps that train nothing.

Must not be used outside tests and benchmarks. `python -m tests.harness.stubs.learner --run ID --redis URL`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeVar

from learner.archive import RunArchive, RunFacts, run_folder
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointHeader
from services.contracts import AFTER, Batch, BatchGroup, CommittedPolicy, SamplerSnapshot, StepRecord, WeightManifest
from services.process.hosting import Context, main
from services.streams.delivery.payloads import fetch
from services.streams.delivery.snapshots import read_snapshot
from services.streams.state.heartbeat import held_version
from services.streams.state.policy_history import History, LoggedBatch
from services.streams.state.runs import RunRecords
from tests.harness.stubs.publisher import StubPublisher

T = TypeVar("T")

BATCHES_S, END_S, REWOUND_S = 0.25, 0.5, 120.0
"""How long one read of the batches waits, how often the end looks for the final evaluations, and how long a rewind may
take."""


class _State:
    """The state of a rank that has no weights."""

    def chunks(self) -> Iterator[memoryview]:
        yield memoryview(b"no weights")


class StubLearner:
    """One learner. `train_s`: how long a step takes."""

    name = "learner"

    def __init__(self, train_s: float = 0.0) -> None:
        self._train_s = train_s
        self._stop = threading.Event()
        self._policy = CommittedPolicy(version=0, step=0)

    async def run(self, context: Context) -> None:
        """Resume at the committed step, train until the last one, export nothing, then wait for `stopping`."""
        self._context, self._recipe = context, context.record.recipe
        self._history = await History.fenced(context.redis, context.keys, self.name, context.heartbeat.info.id)
        self._publisher = StubPublisher(context, self._history)
        self._archive = RunArchive(run_folder(context.record.id))
        self._checkpoints = Checkpoints(self._archive)
        await self._history.publish_manifest(WeightManifest(buckets=()))
        await self._resume()
        await context.heartbeat.update(state="ready", version=self._policy.version)
        try:
            await self._train()
            await self._end()
        finally:
            self._stop.set()

    async def _resume(self) -> None:
        """Commit the policy of the committed step under its version, and make the folder match the history."""
        policy = await self._history.policy()
        facts = RunFacts(
            run=self._context.record.id,
            recipe=self._recipe,
            model_path="none",
            ranks=1,
            device="none",
            versions={},
        )
        await self._files(partial(self._archive.start, facts, self._history.fence, resumed=policy is not None))
        await self._files(partial(self._checkpoints.clear_interrupted, self._history.fence))
        await self._history.release_committed(policy.step if policy else 0)
        step = policy.step if policy else 0
        if policy is not None and policy.resumption < self._context.record.resumptions:
            step = await self._rewound(step)
        digest = f"w{step}"
        records = [record for _, record in await self._context.event_log.steps()]
        await self._files(partial(self._checkpoints.delete_after, step, self._history.fence))
        committed = {record.step: record.fence for record in records}
        await self._files(partial(self._archive.delete_after, step, self._history.fence, committed))
        for record, _ in await self._files(partial(self._archive.outdated_records, records)):
            await self._files(partial(self._archive.write_record, record))
        held = await held_version(self._context.redis, self._context.keys.run)
        version = await self._history.announce(step, digest, self._recipe.limits.max_staleness, held)
        await self._history.commit_policy(version, step, digest)
        self._policy = CommittedPolicy(version=version, step=step, weights=digest)
        await self._publisher.publish(version)

    async def _rewound(self, step: int) -> int:
        """Give the sampler the snapshot of the step from which the run is resumed, and wait for its rewind.

        Returns the step; `step`, the committed one, without a rewind.
        """
        record = self._context.record
        if record.resume_step is None:
            return step
        complete = await self._files(self._checkpoints.complete)
        found = next((each for each in complete if each.step == record.resume_step), None)
        text = await self._files(partial(self._checkpoints.sampler, found)) if found else None
        if text is None:
            raise RuntimeError(f"no checkpoint of step {record.resume_step} has the sampler's snapshot")
        await self._history.publish_snapshot(SamplerSnapshot.model_validate_json(text))
        ends = time.monotonic() + REWOUND_S
        while (policy := await self._history.policy()) is None or policy.resumption < record.resumptions:
            if time.monotonic() > ends or self._context.stopping.is_set():
                raise RuntimeError(f"the sampler did not rewind the run to step {record.resume_step}")
            await asyncio.sleep(BATCHES_S)
        return record.resume_step

    async def _train(self) -> None:
        after, waits = "0-0", self._context.waits
        last = await self._history.final_step() or self._recipe.limits.rollout_steps
        while self._policy.step < last and not self._context.stopping.is_set():
            await self._publisher.serve_joining(self._policy.version)
            waits.pending("batches", "the next batch", self._recipe.limits.stall_timeout_s, idle=True)
            found = await self._history.batches(after, BATCHES_S)
            if not found and ((policy := await self._history.policy()) is None or policy.step < self._policy.step):
                raise RuntimeError(f"Redis lost step {self._policy.step}; a restarted learner resumes at {policy}")
            for logged in found:
                waits.done("batches")
                after = logged.entry
                step = self._policy.step + 1
                if logged.batch.step > self._policy.step and not await self._history.accepts(logged, step):
                    continue
                if logged.batch.step == step:
                    await self._step(logged)
                    last = logged.batch.step if logged.batch.last else last
                    await self._save()
                await self._history.release_batch(logged)

    async def _step(self, logged: LoggedBatch) -> None:
        """Fetch and archive the payloads, publish a version and commit the step."""
        started_at = time.time()
        batch = await self._archived(logged.batch)
        await asyncio.sleep(self._train_s)
        digest = f"w{batch.step}"
        version = await self._history.announce(batch.step, digest, self._recipe.limits.max_staleness)
        await self._publisher.publish(version)
        record = StepRecord(
            step=batch.step,
            version=version,
            weights=digest,
            optimizer_steps=1,
            groups=tuple(group.group for group in batch.groups),
            prompts=tuple(group.prompt for group in batch.groups),
            staleness=tuple(group.staleness for group in batch.groups),
            metrics=batch.sampling_metrics,
            generation_started_at=batch.generation_started_at,
            generation_finished_at=batch.generation_finished_at,
            learning_started_at=started_at,
            learning_finished_at=time.time(),
            epoch=self._history.fence.epoch,
            owner=self._history.fence.owner,
        )
        await self._history.commit_step(record, logged.entry)
        self._policy = CommittedPolicy(version=version, step=batch.step, weights=digest)
        await self._context.heartbeat.update(version=version)
        await self._files(partial(self._archive.write_record, record))

    async def _archived(self, batch: Batch) -> Batch:
        """The batch as it was archived: samples with a damaged payload are masked."""
        used = {
            sample.payload for group in batch.groups for sample in group.samples if sample.tokens and not sample.masked
        }
        whole, damaged = await fetch(self._context.redis, sorted(used))
        if damaged:
            text = f"step {batch.step}: {'; '.join(damaged.values())}"
            await self._context.event_log.write("payload-damaged", text)
            batch = _masked(batch, damaged)
        await self._files(partial(self._archive.write_share, batch, 0, whole, self._history.fence))
        await self._files(partial(self._archive.write_batch, batch, self._history.fence))
        return batch

    async def _save(self) -> None:
        """Write a checkpoint when one is due."""
        every, step = self._recipe.learner.checkpoint_every, self._policy.step
        if not every or step % every:
            return
        snapshot = await read_snapshot(self._context.redis, self._context.keys.snapshot(step))
        text = snapshot.model_dump_json() if snapshot else None
        await self._files(partial(self._checkpoint, self._policy, text))
        complete = await self._files(self._checkpoints.complete)
        await self._history.publish_checkpoints(sorted({found.step for found in complete}))

    def _checkpoint(self, policy: CommittedPolicy, sampler: str | None) -> None:
        if policy.step in {found.step for found in self._checkpoints.complete()}:
            return
        name = self._checkpoints.partial.start(policy.step, self._history.fence)
        self._checkpoints.partial.write(name, 0, _State(), self._stop)
        header = CheckpointHeader(
            step=policy.step,
            version=policy.version,
            ranks=1,
            zero_stage=0,
            dtype="none",
            weights=policy.weights,
            epoch=self._history.fence.epoch,
            owner=self._history.fence.owner,
        )
        self._checkpoints.commit(name, header, self._stop, sampler=sampler)
        self._checkpoints.prune(self._recipe.learner.checkpoints_kept, policy.step, self._history.fence)

    async def _end(self) -> None:
        """Report an export once every set has its last evaluation; serve joining replicas until stopped."""
        exported = False
        while not self._context.stopping.is_set():
            await self._publisher.serve_joining(self._policy.version)
            if not exported:
                found = await self._context.event_log.evaluations()
                done = {evaluation.set for evaluation in found if evaluation.name == AFTER}
                if exported := done.issuperset(self._recipe.evaluated_sets):
                    place = str(self._archive.folder / "export")
                    records, fence = RunRecords(self._context.redis), self._history.fence
                    await records.set_paths(self._context.record.id, fence, self.name, export_path=place)
            try:
                await asyncio.wait_for(self._context.stopping.wait(), END_S)
            except TimeoutError:
                continue

    async def _files(self, work: Callable[[], T]) -> T:
        """Run blocking file work in a thread, like the real learner: the loop has to send heartbeats."""
        return await asyncio.to_thread(work)


def _masked(batch: Batch, payloads: Collection[str]) -> Batch:
    """As learner.training.minibatches.masked, which needs torch."""

    def mask(group: BatchGroup) -> BatchGroup:
        samples = (
            sample.model_copy(update={"masked": True}) if sample.payload in payloads else sample
            for sample in group.samples
        )
        return group.model_copy(update={"samples": tuple(samples)})

    return batch.model_copy(update={"groups": tuple(mask(group) for group in batch.groups)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--train-s", type=float, default=0.0)
    mine, others = parser.parse_known_args()
    sys.exit(main(lambda: StubLearner(mine.train_s), others))
