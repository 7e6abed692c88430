"""Checkpoints on disk: found again, skipped if damaged, completed by late ranks, deleted when old."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from learner.archive import ArchiveError, RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import MANIFEST, CheckpointError
from learner.coordinator.checkpoint_schedule import CheckpointSchedule
from learner.training.process_group import Ranks
from learner.training.trainer import leave
from services.contracts import Fence
from tests.learner.checkpointing import (
    NEVER,
    Slow,
    archive_with,
    bits,
    block_of,
    header,
    names,
    open_trainer,
    records_of,
    save,
    tensors_of,
    train,
)
from tests.learner.committed import WRITER

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
STEPS = 6


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    return archive_with(tmp_path / "run", STEPS)


@pytest.fixture
def checkpoints(archive: RunArchive) -> Checkpoints:
    return Checkpoints(archive)


def test_a_written_checkpoint_is_found_again(archive: RunArchive, checkpoints: Checkpoints) -> None:
    assert checkpoints.newest_intact(STEPS) == (None, {})
    first = save(checkpoints, header(2), block_of(1000), block_of(10, seed=1))
    sampler = json.dumps({"cursor": 7, "text": "é"})
    second = save(checkpoints, header(5, version=8), block_of(1000, seed=2), sampler=sampler)
    assert (second.step, second.version, second.ranks, second.zero_stage, second.dtype) == (5, 8, 1, 1, "float32")
    assert (first.epoch, first.owner) == (WRITER.epoch, WRITER.owner)
    assert names(archive) == [first.name, second.name]
    folder = checkpoints.path(first)
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST,
        "rank-0000.safetensors",
        "rank-0001.safetensors",
    ]
    for name, facts in first.files.items():
        data = (folder / name).read_bytes()
        assert (facts.size, facts.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert checkpoints.newest_intact(STEPS) == (second, {})
    assert checkpoints.newest_intact(4) == (first, {})
    assert checkpoints.complete() == [first, second]
    assert (checkpoints.sampler(first), checkpoints.sampler(second)) == (None, sampler)
    assert torch.equal(tensors_of(checkpoints.path(second))["master.weight"], block_of(1000, seed=2)["master.weight"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def count_on(path: Path) -> None:
    """Change a manifest that stays readable."""
    text = path.read_text()
    assert '"version":4' in text
    path.write_text(text.replace('"version":4', '"version":5'))


@pytest.mark.parametrize(
    ("file", "harm", "reason"),
    [
        ("rank-0001.safetensors", flip, "damaged (its content does not match checkpoint.json)"),
        ("rank-0001.safetensors", cut_short, "damaged (its content does not match checkpoint.json)"),
        ("rank-0000.safetensors", Path.unlink, "missing"),
        ("sampler.json", flip, "damaged (its content does not match checkpoint.json)"),
        (MANIFEST, count_on, "damaged (its content does not match its digest or its folder)"),
        (MANIFEST, cut_short, "damaged (Invalid JSON"),
        (MANIFEST, Path.unlink, "missing"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_reported(
    archive: RunArchive, checkpoints: Checkpoints, file: str, harm: Callable[[Path], None], reason: str
) -> None:
    good = save(checkpoints, header(2), block_of(1000), block_of(1000), sampler="{}")
    bad = save(checkpoints, header(4), block_of(1000), block_of(1000), sampler="{}")
    path = checkpoints.path(bad) / file
    harm(path)
    found, skipped = checkpoints.newest_intact(STEPS)
    assert (found, list(skipped)) == (good, [bad.name])
    assert skipped[bad.name].startswith(f"{path}: {reason}")
    # A checkpoint that is set aside does not count as usable.
    checkpoints.set_aside(skipped, WRITER)
    save(checkpoints, header(5), block_of(10))
    checkpoints.prune(2, STEPS, WRITER)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 5]
    assert list(archive.trained()) == [3, 4, 5, 6]
    assert f"damaged-{bad.name}" in names(archive)
    save(checkpoints, header(6), block_of(10))
    checkpoints.prune(2, STEPS, WRITER)
    assert [name[:11] for name in names(archive)] == ["step-000005", "step-000006"]


def test_a_renamed_folder_is_no_checkpoint(archive: RunArchive, checkpoints: Checkpoints) -> None:
    saved = save(checkpoints, header(2), block_of(10))
    checkpoints.path(saved).rename(archive.checkpoints / saved.name.replace("000002", "000004"))
    found, skipped = checkpoints.newest_intact(STEPS)
    assert found is None
    assert ["does not match its digest or its folder" in reason for reason in skipped.values()] == [True]


def test_the_checkpoint_of_the_latest_version_is_used(archive: RunArchive, checkpoints: Checkpoints) -> None:
    save(checkpoints, header(2, version=2), block_of(10))
    later = save(checkpoints, header(2, version=7), block_of(10, seed=1))
    earlier = save(checkpoints, header(2, version=3), block_of(10))
    assert checkpoints.newest_intact(STEPS) == (later, {})
    flip(checkpoints.path(later) / "rank-0000.safetensors")
    assert checkpoints.newest_intact(STEPS)[0] == earlier
    checkpoints.set_aside([later.name], WRITER)
    checkpoints.prune(1, STEPS, WRITER)
    assert names(archive) == [f"damaged-{later.name}", earlier.name]


def test_the_last_checkpoints_and_a_partial_one_are_kept(archive: RunArchive, checkpoints: Checkpoints) -> None:
    in_progress = checkpoints.partial.start(6, WRITER)
    checkpoints.partial.write(in_progress, 0, block_of(10), NEVER)
    for step in (1, 2):
        save(checkpoints, header(step), block_of(10))
        checkpoints.prune(3, STEPS, WRITER)
    assert list(archive.trained()) == [1, 2, 3, 4, 5, 6]
    for step in (3, 4):
        save(checkpoints, header(step), block_of(10))
        checkpoints.prune(3, STEPS, WRITER)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 3, 4]
    assert list(archive.trained()) == [3, 4, 5, 6]
    checkpoints.delete_after(3, WRITER)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 3]
    checkpoints.commit(in_progress, header(6), NEVER)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 3, 6]
    assert checkpoints.clear_interrupted(WRITER) == []


def test_rank_0_waits_for_the_others_without_reading_their_files(archive: RunArchive, checkpoints: Checkpoints) -> None:
    late = Slow(block_of(1000, seed=1), threading.Event(), threading.Event())
    name = checkpoints.partial.start(2, WRITER)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(checkpoints.partial.write, name, 1, late, NEVER)
        checkpoints.partial.write(name, 0, block_of(1000), NEVER)
        committing = threads.submit(checkpoints.commit, name, header(2, ranks=2), NEVER)
        assert late.begun.wait(120)
        time.sleep(0.3)
        assert (committing.done(), checkpoints.complete()) == (False, [])
        # Rank 0 trusts the rank's report: reading the file again would reveal this.
        flip(archive.checkpoints / f".{name}" / "rank-0000.safetensors")
        late.go.set()
        other.result(120)
        checkpoint = committing.result(120)
    assert checkpoint.ranks == 2
    assert checkpoints.newest_intact(STEPS)[0] is None


def test_a_rank_that_never_writes_is_named_at_the_deadline(archive: RunArchive, checkpoints: Checkpoints) -> None:
    before = save(checkpoints, header(2), block_of(10))
    name = checkpoints.partial.start(4, WRITER)
    checkpoints.partial.write(name, 0, block_of(10), NEVER)
    with pytest.raises(CheckpointError, match=r"ranks \[1, 2\] did not write their files within 0\.3 s"):
        checkpoints.commit(name, header(4, ranks=3), NEVER, deadline_s=0.3)
    assert names(archive) == [before.name]
    # A rank that writes later cannot complete it.
    with pytest.raises(CheckpointError, match="abandoned by rank 0"):
        checkpoints.partial.write(name, 1, block_of(10), NEVER)
    assert names(archive) == [before.name]


def test_an_abandoned_checkpoint_leaves_nothing_behind(
    archive: RunArchive, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(block_of(10_000_000), threading.Event(), threading.Event())
    name = checkpoints.partial.start(2, WRITER)
    remove = shutil.rmtree

    def late(path: Path, **given: Any) -> None:
        with pytest.raises(CheckpointError, match="abandoned by rank 0"):
            checkpoints.partial.write(name, 2, block_of(10), NEVER)
        remove(path, **given)

    monkeypatch.setattr(shutil, "rmtree", late)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(checkpoints.partial.write, name, 1, slow, NEVER)
        assert slow.begun.wait(120)
        checkpoints.partial.abandon(name)
        slow.go.set()
        with pytest.raises(CheckpointError, match="abandoned by rank 0"):
            writing.result(120)
    assert names(archive) == []


def test_a_learner_that_stops_does_not_wait(archive: RunArchive, checkpoints: Checkpoints) -> None:
    stop = threading.Event()
    name = checkpoints.partial.start(2, WRITER)
    with ThreadPoolExecutor(1) as threads:
        committing = threads.submit(checkpoints.commit, name, header(2), stop)
        time.sleep(0.2)
        stop.set()
        with pytest.raises(CheckpointError, match="the learner is stopping"):
            committing.result(120)
    with pytest.raises(CheckpointError, match="abandoned by rank 0"):
        checkpoints.partial.write(name, 0, block_of(10), stop)
    assert names(archive) == []
    name = checkpoints.partial.start(2, WRITER)
    with pytest.raises(CheckpointError, match="the learner is stopping"):
        checkpoints.partial.write(name, 0, block_of(10), stop)


def test_training_continues_while_a_checkpoint_is_written(
    tiny_model: Path, archive: RunArchive, checkpoints: Checkpoints
) -> None:
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    trainer = open_trainer(tiny_model, 1, "float32", ranks)
    try:
        train(trainer, 0, 0)
        captured = trainer.capture()
        same = trainer.capture()
        slow = Slow(captured, threading.Event(), threading.Event())
        name = checkpoints.partial.start(1, WRITER)
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(checkpoints.partial.write, name, 0, slow, NEVER)
            assert slow.begun.wait(120)
            # The header is written already; the tensors are written while these steps change all of them.
            trained = [train(trainer, version, 0) for version in (1, 2)]
            assert not writing.done()
            slow.go.set()
            writing.result(120)
        checkpoint = checkpoints.commit(name, header(1), NEVER)
        kept = tensors_of(checkpoints.path(checkpoint))
        now = trainer.capture()
        assert all(torch.equal(bits(tensor), bits(same[key])) for key, tensor in kept.items())
        assert all(not torch.equal(tensor, now[key]) for key, tensor in kept.items() if key.startswith("master"))
        checkpoints.load(trainer, checkpoint.name)
        assert [train(trainer, version, 0) for version in (1, 2)] == trained
    finally:
        trainer.close()
        leave(ranks)


def test_a_missing_checkpoint_is_named(checkpoints: Checkpoints) -> None:
    class NoTrainer:
        def restore(self, files: object) -> None:
            raise AssertionError("nothing can be restored")

    with pytest.raises(ArchiveError, match=r"step-000001-00000000/checkpoint\.json: missing"):
        checkpoints.load(NoTrainer(), "step-000001-00000000")


async def test_a_late_checkpoint_of_an_abandoned_step_does_not_count(
    archive: RunArchive, checkpoints: Checkpoints
) -> None:
    """Its learner was replaced while it wrote; the step was trained again, with another result."""
    records = {step: record.model_copy(update={"weights": f"w{step}"}) for step, record in records_of(STEPS).items()}
    second, fourth, _, sixth = [
        save(checkpoints, header(step).model_copy(update={"weights": weights}), block_of(10))
        for step, weights in [(2, ""), (4, "w4"), (5, "abandoned"), (6, "w6")]
    ]
    published: list[list[int]] = []

    async def publish_checkpoints(steps: list[int]) -> None:
        published.append(steps)

    history, worker = SimpleNamespace(publish_checkpoints=publish_checkpoints), SimpleNamespace(checkpoints=checkpoints)
    unused: Any = None
    schedule = CheckpointSchedule(unused, cast(Any, history), cast(Any, worker), records.values(), covered=6)
    await schedule.publish_list(6, 2)
    await schedule.publish_list(5)
    assert published == [[4, 6], [2, 4]], "one of an older release has no digest"
    weights = {step: record.weights for step, record in records.items()}
    checkpoints.prune(3, 6, WRITER, weights)
    assert checkpoints.complete() == [second, fourth, sixth]
    checkpoints.prune(2, 6, WRITER, weights)
    assert checkpoints.complete() == [fourth, sixth]
    assert list(archive.trained()) == [5, 6]


def test_a_replaced_learner_deletes_no_newer_checkpoint(archive: RunArchive, checkpoints: Checkpoints) -> None:
    successor = Fence(WRITER.epoch + 1, "learner-5e6f7a8b")
    before = save(checkpoints, header(1), block_of(10))
    own = [save(checkpoints, header(step, fence=successor), block_of(10)) for step in (2, 3)]
    late = save(checkpoints, header(6), block_of(10))  # of a history that the run was rewound over
    checkpoints.prune(1, 6, WRITER)
    assert checkpoints.delete_after(2, WRITER) == [late.name]
    assert checkpoints.complete() == own
    late = save(checkpoints, header(6), block_of(10))
    checkpoints.prune(2, 3, successor)
    assert checkpoints.complete() == [*own, late], "it is not among the last two up to step 3"
    assert checkpoints.delete_after(3, successor) == [late.name]
    assert before not in checkpoints.complete()
