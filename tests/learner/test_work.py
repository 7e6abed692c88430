"""A rank's checkpoints: started between two steps, written during the next, abandoned safely, resumed from."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointError
from learner.rank.worker import RankWorker
from learner.recovery.start import MissingBatchesError, archived_payloads
from learner.training.minibatches import masked
from services.contracts import Batch
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import fetch, pack
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from tests.harness.small_run import service_context
from tests.learner.checkpointing import Slow
from tests.learner.committed import WRITER, record_of
from tests.learner.crashing import Endless
from tests.learner.running import (
    drain_ranks,
    draw_batch,
    end_ranks,
    put_batch,
    put_evaluation,
    start_ranks,
    submit,
    until_event,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
LEARNER = {"warmup_rollout_steps": 8, "checkpoint_every": 1, "checkpoints_kept": 2}


@asynccontextmanager
async def working(redis: Any, run: str) -> AsyncIterator[RankWorker]:
    """The only rank of a submitted run."""
    async with service_context(redis, run, {}, "learner") as context:
        worker = RankWorker(context, 0, 1, ("127.0.0.1", 0))
        try:
            await worker.open()
            yield worker
        finally:
            await worker.close()


async def train(worker: RankWorker, batch: Batch, *, archived: bool = False) -> Any:
    trained = await worker.training.train(batch, WRITER, archived=archived)
    assert trained is not None
    return trained.optimizer


async def test_steps_train_during_a_write_and_again_from_the_archive(
    redis: Any, run_id: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, learner=LEARNER)
    batches = [await put_batch(redis, keys, version) for version in range(4)]
    async with working(redis, run_id) as worker:
        recorded = [await train(worker, batches[0])]
        slow = slowed(worker, monkeypatch)
        await worker.checkpoint_writer.save(1, WRITER)
        committing = asyncio.create_task(worker.checkpoint_writer.commit(1, 1, WRITER, weights="ab", sampler="{}"))
        assert await asyncio.to_thread(slow.begun.wait, 120)
        recorded += [await train(worker, batch) for batch in batches[1:]]
        assert (worker.checkpoint_writer.saving, committing.done()) == (True, False)
        with pytest.raises(RuntimeError, match=r"step 4 cannot be saved while step-000001\..* is being written"):
            await worker.checkpoint_writer.save(4, WRITER)
        slow.go.set()
        checkpoint = await committing
        assert (worker.checkpoint_writer.saving, checkpoint.weights, checkpoint.step) == (False, "ab", 1)
        assert worker.checkpoints.sampler(checkpoint) == "{}"
    # The archive holds all that is needed.
    for batch in batches:
        await redis.delete(*[sample.payload for group in batch.groups for sample in group.samples])
    async with working(redis, run_id) as worker:
        point = await worker.resume.find_start_point(4, [record_of(batch) for batch in batches], WRITER)
        assert (point.checkpoint, point.steps) == (checkpoint, (2, 3, 4))
        await worker.resume.restore(checkpoint.name)
        again = [await train(worker, worker.archive.batch(step, WRITER), archived=True) for step in point.steps]
    assert again == recorded[1:]


def slowed(worker: RankWorker, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Make the write of the next captured state wait for `go`."""
    capture = worker._rank.trainer.capture
    slow = Slow(None, threading.Event(), threading.Event())  # type: ignore[arg-type]

    def captured() -> Slow:
        slow.state = capture()
        return slow

    monkeypatch.setattr(worker._rank.trainer, "capture", captured)
    return slow


async def test_a_failed_write_is_reported_and_the_next_succeeds(redis: Any, run_id: str, tiny_model: Path) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, learner=LEARNER)
    async with working(redis, run_id) as worker:
        await train(worker, await put_batch(redis, keys, 0))
        folder = worker.archive.checkpoints
        shutil.rmtree(folder)
        folder.write_text("in the way")
        with pytest.raises(CheckpointError, match="Not a directory"):
            await worker.checkpoint_writer.save(1, WRITER)
        folder.unlink()
        assert not worker.checkpoint_writer.saving
        await worker.checkpoint_writer.save(1, WRITER)
        # The folder is deleted during the write, or before its commit.
        shutil.rmtree(folder)
        with pytest.raises(CheckpointError):
            await worker.checkpoint_writer.commit(1, 1, WRITER)
        folder.mkdir()
        await train(worker, await put_batch(redis, keys, 1))
        await worker.checkpoint_writer.save(2, WRITER)
        assert (await worker.checkpoint_writer.commit(2, 2, WRITER)).step == 2
        assert [path.name[:11] for path in folder.iterdir()] == ["step-000002"]


async def test_a_write_in_progress_is_abandoned_when_the_learner_ends(
    redis: Any, run_id: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, learner=LEARNER)
    async with working(redis, run_id) as worker:
        await train(worker, await put_batch(redis, keys, 0))
        monkeypatch.setattr(worker._rank.trainer, "capture", Endless)
        await worker.checkpoint_writer.save(1, WRITER)
        assert len(list(worker.archive.checkpoints.iterdir())) == 1
    assert list(worker.archive.checkpoints.iterdir()) == []


async def test_recovery_clears_up(redis: Any, run_id: str, tiny_model: Path) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, learner=LEARNER)
    async with working(redis, run_id) as worker:
        written, records = [], []
        for version in range(3):
            batch = await put_batch(redis, keys, version)
            records.append(record_of(batch))
            await train(worker, batch)
            await worker.checkpoint_writer.save(version + 1, WRITER)
            written.append(await worker.checkpoint_writer.commit(version + 1, version + 1, WRITER))
            await worker.checkpoint_writer.prune(version + 1, WRITER)
        worker.checkpoints.partial.start(3, WRITER)  # a write that is never finished
        (worker.checkpoints.path(written[2]) / "rank-0000.safetensors").write_bytes(b"")
        point = await worker.resume.find_start_point(3, records, WRITER)
        assert (point.checkpoint, point.steps, list(point.skipped)) == (written[1], (3,), [written[2].name])
        aside = f"damaged-{written[2].name}"
        assert sorted(path.name for path in worker.archive.checkpoints.iterdir()) == [aside, written[1].name]
        await train(worker, await put_batch(redis, keys, 2))
        await worker.checkpoint_writer.save(3, WRITER)
        again = await worker.checkpoint_writer.commit(3, 3, WRITER)
        await worker.checkpoint_writer.prune(3, WRITER)
        (worker.checkpoints.path(written[1]) / "rank-0000.safetensors").write_bytes(b"")
        # The batches up to the oldest checkpoint are deleted, step 3 is rewound, the checkpoint of step 2 is damaged.
        assert list(worker.archive.trained()) == [3]
        with pytest.raises(MissingBatchesError, match=r"2 steps after the run's model .*: .*step-000001\..*json"):
            await worker.resume.find_start_point(2, records, WRITER)
        assert worker.checkpoints.complete() == [written[1], again], "nothing is deleted before a start point is found"
        await worker.resume.delete_after(2, [], WRITER)
        assert worker.checkpoints.complete() == [written[1]]
        assert list(worker.archive.trained()) == []
        assert sorted(path.name for path in worker.archive.checkpoints.iterdir()) == [aside, written[1].name]


async def test_a_damaged_record_ends_no_start(redis: Any, run_id: str, tiny_model: Path) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, learner=LEARNER)
    records = [record_of(draw_batch(keys, version)[0]) for version in range(2)]
    async with working(redis, run_id) as worker:
        for record in records:
            worker.archive.write_record(record)
        path = worker.archive.folder / "records/step-000002.e0002-learner-1a2b3c4d.json"
        path.write_text("{")
        await worker.resume.delete_after(2, records, WRITER)
        assert [worker.archive.record(step) for step in (1, 2)] == records
        events = [event for _, event in await EventLog(redis, keys, "test").events()]
        [text] = [event.text for event in events if event.phase == "archive-differs"]
        assert text.startswith(f"{path}: damaged")
        assert text.endswith("the record of Redis replaces it")


@pytest.mark.slow
async def test_two_ranks_train_on_when_nothing_can_be_written(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 3}, learner=LEARNER | {"ranks": 2})
    ranks = start_ranks(run_id, redis_url, 2)
    try:
        await until_event(redis, keys, "ready")
        folder = runs_folder / run_id / "checkpoints"
        folder.rmdir()
        folder.write_text("in the way")
        await put_batch(redis, keys, 0)
        assert "step 1: " in await until_event(redis, keys, "checkpoint-failed")
        folder.unlink()
        await put_batch(redis, keys, 1)
        await until_event(redis, keys, "checkpoint")
        await put_batch(redis, keys, 2)
        await put_evaluation(redis, keys)
        await until_event(redis, keys, "exported")
        await drain_ranks(ranks)
    finally:
        end_ranks(ranks)
    found = Checkpoints(RunArchive(runs_folder / run_id)).complete()
    assert [(checkpoint.step, checkpoint.ranks, len(checkpoint.files)) for checkpoint in found] == [(2, 2, 2)]
    failures = [event.text for _, event in await EventLog(redis, keys, "test").events() if "failed" in event.phase]
    assert len(failures) == 1


async def test_a_payload_without_its_nuclei_is_not_trained(redis: Any, run_id: str, tiny_model: Path) -> None:
    """In a run with top-k. The nuclei of the others are archived with them."""
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, rollout={"top_p": 0.7, "top_k": 20}, limits={"rollout_steps": 1})
    batch = await put_batch(redis, keys, 0)
    lacking, *others = [sample.payload for group in batch.groups for sample in group.samples]
    for key, payload in (await fetch(redis, others))[0].items():
        ids = np.stack([payload.response_ids, (payload.response_ids + 1) % 107], 1).ravel()
        nuclei = Nuclei(ids, 2 * np.arange(len(payload.response_ids) + 1, dtype=np.int32))
        await redis.hset(key, mapping=pack(replace(payload, nuclei=nuclei)))
    async with working(redis, run_id) as worker:
        trained = await worker.training.train(batch, WRITER)
        assert trained is not None
        archived = archived_payloads(worker.archive, masked(batch, [lacking]), WRITER)
    assert trained.damaged == (f"payload {lacking} has no nuclei: expected those of rollout.top_k = 20",)
    assert trained.optimizer_steps == 2
    assert archived.keys() == set(others)
    assert all(payload.nuclei is not None for payload in archived.values())
