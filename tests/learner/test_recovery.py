"""A resumed learner's start point, and its result: the same bits, wherever the previous learner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from learner.archive import ArchiveError, RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.recovery.start import (
    Difference,
    MissingBatchesError,
    StartPoint,
    archived_payloads,
    batch_digest,
    find_start_point,
)
from learner.training.minibatches import masked as with_masked
from learner.training.process_group import Ranks
from learner.training.trainer import leave
from services.contracts import Batch, Fence
from services.streams.keys import RunKeys
from tests.learner.checkpointing import (
    archive_with,
    bits,
    block_of,
    header,
    open_trainer,
    records_of,
    save,
    tensors_of,
    write_state,
)
from tests.learner.committed import WRITER
from tests.learner.running import ROOT, draw_batch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
STEPS = 6
RECORDS = records_of(STEPS)
COMMITTED = "committed"
LIFE_S = 240.0
"""The time limit (seconds) of each learner, including its start."""


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    return archive_with(tmp_path / "run", STEPS)


@pytest.fixture
def checkpoints(archive: RunArchive) -> Checkpoints:
    return Checkpoints(archive)


def test_from_the_newest_intact_checkpoint_to_the_last_step(archive: RunArchive, checkpoints: Checkpoints) -> None:
    assert found(archive, checkpoints, 0) == StartPoint(None, (), {})
    assert found(archive, checkpoints, 2) == StartPoint(None, (1, 2), {})
    second = save(checkpoints, header(2), block_of(10))
    fourth = save(checkpoints, header(4), block_of(10))
    assert found(archive, checkpoints, 6) == StartPoint(fourth, (5, 6), {})
    assert found(archive, checkpoints, 4) == StartPoint(fourth, (), {})
    # Rewound to step 3: later checkpoints are ignored.
    assert found(archive, checkpoints, 3) == StartPoint(second, (3,), {})
    (checkpoints.path(fourth) / "rank-0000.safetensors").unlink()
    damaged = found(archive, checkpoints, 6)
    assert (damaged.checkpoint, damaged.steps, list(damaged.skipped)) == (second, (3, 4, 5, 6), [fourth.name])
    (checkpoints.path(second) / "checkpoint.json").write_text("{")
    from_the_model = found(archive, checkpoints, 6)
    assert (from_the_model.checkpoint, from_the_model.steps) == (None, (1, 2, 3, 4, 5, 6))
    assert list(from_the_model.skipped) == [fourth.name, second.name]


def found(archive: RunArchive, checkpoints: Checkpoints, committed: int) -> StartPoint:
    return find_start_point(archive, checkpoints, committed, RECORDS)


def test_batches_that_are_missing_or_damaged_are_named(archive: RunArchive, checkpoints: Checkpoints) -> None:
    save(checkpoints, header(2), block_of(10))
    damaged = save(checkpoints, header(3), block_of(10))
    (checkpoints.path(damaged) / "rank-0000.safetensors").unlink()
    archive.batch_path(3, WRITER).unlink()
    archive.share_path(5, 0, WRITER).write_bytes(archive.share_path(5, 0, WRITER).read_bytes()[:-20])
    archive.share_path(6, 0, WRITER).unlink()
    point = found(archive, checkpoints, 6)
    assert list(point.missing) == [3, 5, 6]
    text = str(MissingBatchesError("run", point))
    assert text.startswith("3 steps after the checkpoint of step 2 cannot be retrained: ")
    assert "step-000003.e0002-learner-1a2b3c4d.json: missing" in text
    assert "step-000005.e0002-learner-1a2b3c4d.rank-0.parquet: damaged" in text
    assert "step-000006.e0002-learner-1a2b3c4d.rank-0.parquet: missing" in text
    assert text.endswith("`penstock resume run --from STEP`, where STEP is 2, or 0 for the run's model")
    assert f"{damaged.name}/rank-0000.safetensors: missing" in text
    # Earlier start points are still found.
    assert found(archive, checkpoints, 2).steps == ()


def test_shares_of_any_number_of_ranks_make_a_whole_batch(archive: RunArchive) -> None:
    batch, payloads = draw_batch(RunKeys("run"), 3)
    masked = batch.groups[0].samples[1].payload
    batch = with_masked(batch, [masked])
    keys = [key for key in payloads if key != masked]
    for rank in range(3):
        archive.write_share(batch, rank, {key: payloads[key] for key in keys[rank::3]}, WRITER)
    payloads_found = archived_payloads(archive, batch, WRITER)
    assert payloads_found.keys() == set(keys)
    assert all((payloads_found[key].response_ids == payloads[key].response_ids).all() for key in keys)
    archive.share_path(4, 1, WRITER).unlink()
    with pytest.raises(ArchiveError, match=r"step-000004\.e0002-.*\.rank-\*\.parquet: missing 5 of 15 payloads"):
        archived_payloads(archive, batch, WRITER)


LATE = Fence(1, "learner-00000000")
"""A learner that was replaced, and writes on."""


def test_a_late_batch_of_a_replaced_learner_is_not_used(archive: RunArchive, checkpoints: Checkpoints) -> None:
    other, payloads = draw_batch(RunKeys("run"), 30)
    archive.write_batch(other.model_copy(update={"step": 3}), LATE)
    archive.write_share(other.model_copy(update={"step": 3}), 0, payloads, LATE)
    archive.write_batch(archive.batch(4, WRITER), LATE)  # the same groups: it died before its commit
    archive.batch_path(5, LATE).write_text("{")
    point = found(archive, checkpoints, 6)
    assert (point.steps, dict(point.missing)) == ((1, 2, 3, 4, 5, 6), {})
    assert [(difference.step, difference.writer) for difference in point.differing] == [(3, LATE), (5, LATE)]
    assert point.differing[0].what == ("its groups are not those of the committed step: v2g0, v2g1, v2g2, v2g3")
    assert "damaged" in point.differing[1].what


def test_a_batch_with_other_groups_than_recorded_is_refused(archive: RunArchive, checkpoints: Checkpoints) -> None:
    batch = archive.batch(2, WRITER)
    archive.write_batch(batch.model_copy(update={"groups": batch.groups[::-1]}), WRITER)
    point = found(archive, checkpoints, 3)
    what = "its groups are not those of the committed step: another order"
    assert point.differing == (Difference(2, what, WRITER),)
    assert point.missing == {2: f"{archive.batch_path(2, WRITER)}: {what}"}
    unknown = find_start_point(archive, checkpoints, 1, {})
    assert unknown.missing == {1: "Redis has no record of step 1"}


@pytest.mark.parametrize(
    ("field", "value"), [("advantage", -1.5), ("masked", True), ("payload", "payload:v9g9:0"), ("tokens", 1)]
)
def test_a_batch_with_other_samples_is_refused(
    archive: RunArchive, checkpoints: Checkpoints, field: str, value: object
) -> None:
    archive.write_batch(with_other(archive.batch(2, WRITER), field, value), WRITER)
    archive.write_batch(archive.batch(2, WRITER), LATE)
    point = found(archive, checkpoints, 3)
    what = "its samples are not those of the committed step: another payload, length, advantage or mask"
    assert point.differing == (Difference(2, what, WRITER), Difference(2, what, LATE))[::-1]
    assert point.missing == {2: f"{archive.batch_path(2, WRITER)}: {what}"}
    archive.set_aside(2, WRITER, WRITER)
    again = found(archive, checkpoints, 3).missing[2]
    name = archive.batch_path(2, WRITER).name
    assert again.endswith(f"{name}: missing; differs-{name} did not match the committed step")


def test_a_record_of_an_older_release_compares_groups_only(archive: RunArchive, checkpoints: Checkpoints) -> None:
    archive.write_batch(with_other(archive.batch(2, WRITER), "advantage", -1.5), WRITER)
    older = {step: record.model_copy(update={"batch_digest": ""}) for step, record in RECORDS.items()}
    assert find_start_point(archive, checkpoints, 3, older) == StartPoint(None, (1, 2, 3), {})


def test_a_batch_digest_covers_only_what_trains(archive: RunArchive) -> None:
    batch = archive.batch(2, WRITER)
    assert batch_digest(batch) == "58e300924cdb2e9655ad843860fffc54", "archived batches keep theirs"
    assert batch_digest(with_other(batch, "staleness", 1).model_copy(update={"version": 9})) == batch_digest(batch)
    assert batch_digest(batch.model_copy(update={"groups": batch.groups[::-1]})) != batch_digest(batch)


def with_other(batch: Batch, field: str, value: object) -> Batch:
    """The batch with another value of the first group's first sample."""
    group = batch.groups[0]
    sample = group.samples[0].model_copy(update={field: value})
    changed = group.model_copy(update={"samples": (sample, *group.samples[1:])})
    return batch.model_copy(update={"groups": (changed, *batch.groups[1:])})


def test_a_checkpoint_with_other_weights_is_refused(archive: RunArchive, checkpoints: Checkpoints) -> None:
    """The run was rewound over it: its step was trained again, with another result."""
    records = {step: record.model_copy(update={"weights": f"w{step}"}) for step, record in RECORDS.items()}
    good = save(checkpoints, header(2).model_copy(update={"weights": "w2"}), block_of(10))
    late = save(checkpoints, header(4).model_copy(update={"weights": "abandoned"}), block_of(10))
    save(checkpoints, header(6).model_copy(update={"weights": "abandoned"}), block_of(10))
    point = find_start_point(archive, checkpoints, 5, records)
    assert (point.checkpoint, point.steps, point.skipped) == (good, (3, 4, 5), {})
    what = "its weights are abandoned, but those of the committed step are w4"
    assert point.differing == (Difference(4, what, checkpoint=late.name),)
    del records[2]
    assert find_start_point(archive, checkpoints, 2, records).differing[0].what == "step 2 has no committed record"
    assert find_start_point(archive, checkpoints, 2, RECORDS).checkpoint == good, "an older release recorded no weights"


def work(folder: str, model: str, last: int) -> None:
    """A learner of one rank without a service: restore the committed step, then train up to step `last`.

    Unless that ends the run, the next step is trained but not committed; the learner then waits to be killed.
    """
    archive = RunArchive(Path(folder))
    checkpoints = Checkpoints(archive)
    committed = archive.folder / COMMITTED
    at = int(committed.read_text()) if committed.exists() else 0
    checkpoints.clear_interrupted(WRITER)
    point = find_start_point(archive, checkpoints, at, RECORDS)
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    trainer = open_trainer(Path(model), 1, "float32", ranks)
    if point.checkpoint:
        checkpoints.load(trainer, point.checkpoint.name)
    for step in [*point.steps, *range(at + 1, STEPS + 1)]:
        batch = archive.batch(step, WRITER)
        trainer.train(trainer.plan(batch), archived_payloads(archive, batch, WRITER))
        if step == last + 1:
            time.sleep(LIFE_S)
            raise TimeoutError(f"the learner was not killed within {LIFE_S:g} s of training step {step}")
        if step > at:
            committed.with_suffix(".new").write_text(str(step))
            committed.with_suffix(".new").replace(committed)
            print(step, point.checkpoint.step if point.checkpoint else 0, flush=True)
        if step % 2 == 0:
            save(checkpoints, header(step), trainer.capture())
            checkpoints.prune(2, step, WRITER)
    write_state(trainer.capture(), archive.folder / "end", 0)
    trainer.close()
    leave(ranks)


def begin(folder: Path, model: Path, last: int = STEPS) -> subprocess.Popen[str]:
    code = f"from tests.learner.test_recovery import work; work({str(folder)!r}, {str(model)!r}, {last})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "begins"),
    [
        # After the checkpoint of step 2.
        ((3,), [(0,), (2,)]),
        # Also without a checkpoint, and while that of step 4 is written.
        ((1, 3, 4), [(0,), (0,), (2,), (2, 4)]),
    ],
)
def test_a_learner_killed_repeatedly_ends_with_the_same_bits(
    tiny_model: Path, tmp_path: Path, kills: tuple[int, ...], begins: list[tuple[int, ...]]
) -> None:
    """`kills`: the learner is killed after these commits; `begins`: each start's possible checkpoints, 0: none."""
    folders = [archive_with(tmp_path / name, STEPS).folder for name in ("undisturbed", "killed")]
    undisturbed = begin(folders[0], tiny_model)
    starts: list[int] = []
    try:
        starts += [killed_after(begin(folders[1], tiny_model, last), last) for last in kills]
        output, _ = begin(folders[1], tiny_model).communicate(timeout=LIFE_S)
        starts.append(int(output.splitlines()[-1].split()[1]))
        assert undisturbed.wait(LIFE_S) == 0
    finally:
        undisturbed.kill()
        undisturbed.communicate(timeout=60)
    assert all(start in allowed for start, allowed in zip(starts, begins, strict=True)), starts
    ends = [tensors_of(folder / "end") for folder in folders]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(bits(tensor), bits(ends[1][name])) for name, tensor in ends[0].items())
    assert int(ends[0]["rollout_steps"]) == STEPS


def killed_after(process: subprocess.Popen[str], last: int) -> int:
    """Kill the learner between the commits of step `last` and the next; returns the step of its checkpoint."""
    watchdog = threading.Timer(LIFE_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            step, start = map(int, line.split())
            if step == last:
                time.sleep(0.002)
                return start
        raise AssertionError(f"the learner ended with {process.wait(60)} before step {last}")
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate(timeout=60)
