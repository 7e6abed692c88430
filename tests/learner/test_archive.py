"""A run's folder: files are read back, damage is reported, retention keeps what replay needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from learner.archive import ArchiveError, RunArchive, RunFacts, atomic_file
from services.contracts import (
    UNOWNED,
    Batch,
    BatchGroup,
    BatchSample,
    Fence,
    OptimizerStepRecord,
    StepRecord,
)
from services.settings import parse_recipe
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import SamplePayload
from tests.harness.batches import batch_with
from tests.harness.small_run import recipe_document
from tests.learner.committed import WRITER


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    made = RunArchive(tmp_path / "run")
    made.prepare()
    return made


def batch(step: int, keys: tuple[str, ...] = ("a", "b", "c")) -> Batch:
    samples = tuple(
        BatchSample(payload=key, tokens=2, advantage=0.1 + 0.2, reward=1.0, correct=True, masked=False, staleness=0)
        for key in keys
    )
    return batch_with((BatchGroup(group="g", samples=samples),), step=step, version=step - 1)


def payload(prompt: list[int], response: list[int], logprobs: list[float]) -> SamplePayload:
    return SamplePayload(
        np.array(prompt, np.int32), np.array(response, np.int32), np.array(logprobs, np.float32), "", "", ()
    )


PAYLOADS = {
    "a": payload([1, 2, 3], [4, 5], [-0.1, -1e-30]),
    "b": payload([7], [], []),
    "c": payload([2**31 - 1], [0], [-float("inf")]),
}


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        version=step,
        optimizer_steps=1,
        groups=("g",),
        metrics={"loss": 0.1 + 0.2},
        optimizer=(OptimizerStepRecord(loss=1 / 3, gradient_norm=None, applied=False),),
        generation_started_at=1.0,
        generation_finished_at=2.0,
        learning_started_at=3.0,
        learning_finished_at=4.0,
        epoch=WRITER.epoch,
        owner=WRITER.owner,
    )


def test_a_share_is_read_back_bit_by_bit(archive: RunArchive) -> None:
    archive.write_share(batch(12), 1, PAYLOADS, WRITER)
    assert archive.share_path(12, 1, WRITER).name == "step-000012.e0002-learner-1a2b3c4d.rank-1.parquet"
    found = archive.share(12, 1, WRITER)
    assert list(found) == ["a", "b", "c"]
    for key, original in PAYLOADS.items():
        for field in ("prompt_ids", "response_ids", "behaviour_logprobs"):
            before, after = getattr(original, field), getattr(found[key], field)
            assert (before.dtype, before.tobytes()) == (after.dtype, after.tobytes())


def test_nuclei_are_read_back_with_their_response(archive: RunArchive) -> None:
    """One response of the share has none, as if an earlier release had sampled it."""
    nuclei = Nuclei(np.array([9, 4, 5], np.int32), np.array([0, 2, 3], np.int32))
    archive.write_share(batch(12), 1, PAYLOADS | {"a": replace(PAYLOADS["a"], nuclei=nuclei)}, WRITER)
    found = archive.share(12, 1, WRITER)
    read = found["a"].nuclei
    assert read is not None
    assert (read.ids.tobytes(), read.offsets.tobytes()) == (nuclei.ids.tobytes(), nuclei.offsets.tobytes())
    assert (found["b"].nuclei, found["c"].nuclei) == (None, None)


def test_a_share_without_nuclei_has_no_further_columns(archive: RunArchive) -> None:
    archive.write_share(batch(12), 1, PAYLOADS, WRITER)
    columns = pq.ParquetFile(archive.share_path(12, 1, WRITER)).schema_arrow.names
    assert columns == ["payload", "group", "prompt_ids", "response_ids", "behaviour_logprobs"]


def test_a_rank_without_work_has_an_empty_share(archive: RunArchive) -> None:
    archive.write_share(batch(1), 0, {}, WRITER)
    assert archive.share(1, 0, WRITER) == {}


def test_messages_are_read_back_equal(archive: RunArchive) -> None:
    archive.write_batch(batch(3), WRITER)
    archive.write_record(record(3))
    archive.write_failure(record(4))
    assert list(archive.trained()) == [3]
    assert archive.batch(3, WRITER) == batch(3)
    assert (archive.record(3), archive.record(4), archive.record(5)) == (record(3), record(4), None)


def test_every_flipped_byte_of_a_share_is_found_or_harmless(archive: RunArchive) -> None:
    archive.write_share(batch(1), 0, PAYLOADS, WRITER)
    path = archive.share_path(1, 0, WRITER)
    whole = path.read_bytes()
    errors = []
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            found = archive.share(1, 0, WRITER)
        except ArchiveError as error:
            errors.append(str(error))
            continue
        for key, original in PAYLOADS.items():  # the flipped byte is not read, such as one of a statistic
            assert found[key].response_ids.tobytes() == original.response_ids.tobytes()
            assert found[key].behaviour_logprobs.tobytes() == original.behaviour_logprobs.tobytes()
    assert len(errors) > 50
    assert all(str(path) in error for error in errors)


@pytest.mark.parametrize("content", [b"", b"{", b'{"kind": "batch"}', b"[]"])
def test_a_damaged_batch_is_named(archive: RunArchive, content: bytes) -> None:
    archive.batch_path(2, WRITER).write_bytes(content)
    with pytest.raises(ArchiveError, match=r"step-000002\.e0002-learner-1a2b3c4d\.json: damaged"):
        archive.batch(2, WRITER)


def test_a_missing_file_is_named(archive: RunArchive) -> None:
    with pytest.raises(ArchiveError, match=r"step-000002\.e0002-learner-1a2b3c4d\.json: missing"):
        archive.batch(2, WRITER)
    with pytest.raises(ArchiveError, match=r"step-000002\.e0002-.*\.rank-0\.parquet: missing"):
        archive.share(2, 0, WRITER)
    with pytest.raises(ArchiveError, match=r"run\.json: missing"):
        archive.facts()


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write(text: str) -> None:
        with atomic_file(path) as partial:
            partial.write_text(text[:3])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write("after")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "before")]


def test_an_archive_starts_once(archive: RunArchive) -> None:
    recipe = parse_recipe(recipe_document("/model"))
    facts = RunFacts(run="run", recipe=recipe, model_path="/model", ranks=2, device="cpu", versions={"torch": "2"})
    archive.start(facts, WRITER)
    archive.write_batch(batch(1), WRITER)
    archive.start(facts, WRITER)  # a learner that died before its first commit
    assert archive.facts() == facts
    archive.write_record(record(1))
    with pytest.raises(ArchiveError, match="an earlier run"):
        archive.start(facts, LATER)


def files(archive: RunArchive) -> list[str]:
    return sorted(path.name for path in archive.share_path(1, 0, WRITER).parent.iterdir())


def test_steps_at_either_end_are_deleted_with_their_shares(archive: RunArchive) -> None:
    for step in range(1, 7):
        archive.write_batch(batch(step), WRITER)
        archive.write_share(batch(step), 0, {}, WRITER)
        archive.write_share(batch(step), 1, {}, WRITER)
        archive.write_record(record(step))
    archive.delete_batches(2, WRITER)
    assert list(archive.trained()) == [3, 4, 5, 6]
    assert all(archive.record(step) for step in range(1, 7)), "records stay"
    archive.delete_after(4, WRITER, {})
    assert list(archive.trained()) == [3, 4]
    assert [archive.record(step) is not None for step in range(1, 7)] == [True, True, True, True, False, False]
    assert files(archive) == [
        f"step-00000{step}.e0002-learner-1a2b3c4d.{part}"
        for step in (3, 4)
        for part in ("json", "rank-0.parquet", "rank-1.parquet")
    ]


LATER = Fence(3, "learner-5e6f7a8b")
SAME_EPOCH = Fence(2, "learner-9c0d1e2f")


def test_learners_do_not_overwrite_each_others_batches(archive: RunArchive) -> None:
    for number, fence in enumerate((UNOWNED, WRITER, SAME_EPOCH, LATER)):
        written = batch(3).model_copy(update={"version": number})
        archive.write_batch(written, fence)
        archive.write_share(written, 0, {}, fence)
        assert archive.batch(3, fence) == written
    assert archive.batches() == [(3, UNOWNED), (3, WRITER), (3, SAME_EPOCH), (3, LATER)]
    assert len(files(archive)) == 8


def test_the_record_of_a_step_names_the_batch_that_counts(archive: RunArchive) -> None:
    for step, fences in {1: [UNOWNED], 2: [WRITER, LATER], 3: [WRITER, LATER], 4: [WRITER], 5: [WRITER, LATER]}.items():
        for fence in fences:
            archive.write_batch(batch(step), fence)
    archive.write_record(record(2))
    archive.write_failure(record(3))
    archive.write_record(record(4).model_copy(update={"owner": LATER.owner}))
    assert archive.trained() == {1: UNOWNED, 2: WRITER, 3: WRITER, 5: LATER}


def test_a_batch_that_is_set_aside_is_deleted_like_others(archive: RunArchive) -> None:
    for step in (1, 2):
        archive.write_batch(batch(step), WRITER)
        archive.write_share(batch(step), 0, {}, WRITER)
        place = archive.set_aside(step, WRITER, WRITER)
    assert Path(place).name == "differs-step-000002.e0002-learner-1a2b3c4d.json"
    assert Path(place).is_file()
    assert archive.batches() == []
    archive.delete_batches(1, WRITER)
    assert [name.partition(".")[0] for name in files(archive)] == ["differs-step-000002", "step-000002"]


def test_a_learner_deletes_no_batch_of_a_newer_one(archive: RunArchive) -> None:
    for fence in (UNOWNED, WRITER, SAME_EPOCH, LATER):
        archive.write_batch(batch(1), fence)
        archive.write_batch(batch(4), fence)
    archive.delete_batches(1, WRITER)
    archive.delete_after(3, WRITER, {})
    kept = [(1, SAME_EPOCH), (1, LATER), (4, SAME_EPOCH), (4, LATER)]
    assert archive.batches() == kept, "of two owners of one epoch, it cannot tell which one was replaced"
    archive.delete_after(0, LATER, {})
    assert archive.batches() == []
