"""A learner that was replaced and wakes up: its late writes and deletions take nothing from its successor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from learner.archive import ArchiveError, RunArchive, RunFacts, atomic_file
from learner.archive.names import facts_name
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint
from learner.rank.run_resume import RunResume
from learner.recovery.start import Difference, find_start_point
from services.contracts import UNOWNED, Batch, Fence
from services.settings import parse_recipe
from services.storage.mirror import run_mirror
from services.streams.keys import RunKeys
from tests.harness.servers.s3_server import S3Server
from tests.harness.small_run import recipe_document
from tests.learner.checkpointing import NEVER, block_of, header, save
from tests.learner.committed import WRITER, record_of
from tests.learner.running import draw_batch

STALE, SUCCESSOR, EQUAL = Fence(2, "learner-aaaaaaaa"), Fence(3, "learner-bbbbbbbb"), Fence(2, "learner-cccccccc")


@pytest.fixture(params=[False, True], ids=["folder", "store"])
def stored(request: pytest.FixtureRequest) -> bool:
    if request.param:
        assert isinstance(request.getfixturevalue("store"), S3Server)
    return bool(request.param)


def opened(folder: Path, *, stored: bool) -> RunArchive:
    archive = RunArchive(folder, run_mirror("run")) if stored else RunArchive(folder)
    archive.prepare()
    return archive


def durable(archive: RunArchive) -> set[str]:
    if archive.mirror.remote:
        return set(archive.mirror.listed())
    return {str(path.relative_to(archive.folder)) for path in archive.folder.rglob("*") if path.is_file()}


def put(archive: RunArchive, step: int, fence: Fence, version: int) -> Batch:
    batch, payloads = draw_batch(RunKeys("run"), version)
    batch = batch.model_copy(update={"step": step})
    archive.write_share(batch, 0, payloads, fence)
    archive.write_batch(batch, fence)
    return batch


def resume(archive: RunArchive) -> RunResume:
    class Rank:
        checkpoints = Checkpoints(archive)

    Rank.archive = archive  # type: ignore[attr-defined]
    return RunResume(Rank())  # type: ignore[arg-type]


def write_run(archive: RunArchive, fence: Fence) -> None:
    """Two steps of a learner with a checkpoint of each, and one that it has not finished."""
    checkpoints = Checkpoints(archive)
    for step in (3, 4):
        archive.write_record(record_of(put(archive, step, fence, step), fence))
        save(checkpoints, header(step, fence=fence), block_of(10))
    archive.write_failure(record_of(put(archive, 5, fence, 5), fence))
    checkpoints.partial.write(checkpoints.partial.start(5, fence), 0, block_of(10), NEVER)


@pytest.mark.parametrize("other", [SUCCESSOR, EQUAL], ids=["newer", "equal epoch"])
def test_a_late_start_deletes_nothing_of_another_owner(tmp_path: Path, stored: bool, other: Fence) -> None:
    archive = opened(tmp_path / "run", stored=stored)
    write_run(archive, other)
    before = durable(archive)
    checkpoints = Checkpoints(archive)
    assert checkpoints.clear_interrupted(STALE) == []
    assert checkpoints.set_aside([checkpoints.complete()[0].name], STALE) == []
    assert archive.set_aside(3, other, STALE) == ""
    assert resume(archive)._set_aside(Difference(3, "other groups", other), STALE) == ""
    assert resume(archive)._delete_after(2, [], STALE) == []
    save(checkpoints, header(9, fence=STALE), block_of(10))
    checkpoints.prune(1, 9, STALE)
    archive.delete_batches(9, STALE)
    assert before <= durable(archive)


@pytest.mark.parametrize("earlier", [STALE, Fence(1, "learner-00000000"), UNOWNED], ids=["own", "older", "unowned"])
def test_an_owner_deletes_what_older_ones_and_itself_wrote(tmp_path: Path, stored: bool, earlier: Fence) -> None:
    archive = opened(tmp_path / "run", stored=stored)
    write_run(archive, earlier)
    assert len(Checkpoints(archive).clear_interrupted(STALE)) == 1 + stored, "its folder, and its files in the store"
    resume(archive)._delete_after(2, [], STALE)
    assert durable(archive) == set()


def test_a_late_cleanup_in_the_store_spares_an_upload(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stale learner is stopped between its look at the store and its deletion; the successor commits meanwhile."""
    archive, stale = (opened(tmp_path / node, stored=True) for node in "ab")
    checkpoints, committed = Checkpoints(archive), list[Checkpoint]()
    name = checkpoints.partial.start(4, SUCCESSOR)
    checkpoints.partial.write(name, 0, block_of(10), NEVER)
    delete = stale.mirror.delete

    def late(files: Any) -> None:
        committed.append(checkpoints.commit(name, header(4, fence=SUCCESSOR), NEVER))
        delete(files)

    monkeypatch.setattr(stale.mirror, "delete", late)
    Checkpoints(stale).clear_interrupted(STALE)
    fresh = Checkpoints(opened(tmp_path / "c", stored=True))
    fresh.stored.fetch_manifests()
    assert fresh.newest_intact(4) == (committed[0], {})


def test_a_late_record_does_not_replace_the_successors(tmp_path: Path, stored: bool) -> None:
    archive = opened(tmp_path / "run", stored=stored)
    late, trained = record_of(put(archive, 3, STALE, 2), STALE), record_of(put(archive, 3, SUCCESSOR, 30), SUCCESSOR)
    archive.write_record(trained)
    archive.write_record(late)  # it was stopped between its commit and this
    assert archive.record(3) == trained
    assert archive.trained() == {3: SUCCESSOR}
    assert archive.outdated_records([trained]) == []
    # A third learner whose Redis has the earlier commit: that of the successor was lost.
    third = Fence(4, "learner-dddddddd")
    assert resume(archive)._delete_after(3, [late], third) == []
    assert (archive.record(3), archive.trained()) == (late, {3: STALE})


def test_a_damaged_record_is_written_again_and_told(tmp_path: Path) -> None:
    archive = opened(tmp_path / "run", stored=False)
    records = [record_of(put(archive, step, WRITER, step), WRITER) for step in (1, 2, 3)]
    for record in records[:2]:
        archive.write_record(record)
    path = archive.folder / "records/step-000002.e0002-learner-1a2b3c4d.json"
    path.write_text("{")
    [fault] = resume(archive)._delete_after(3, records, SUCCESSOR)
    assert fault.startswith(f"{path}: damaged")
    assert [archive.record(step) for step in (1, 2, 3)] == records


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    archive = opened(tmp_path / "run", stored=False)
    batch = put(archive, 3, STALE, 2)
    put(archive, 3, WRITER, 2)
    shutil.copy(archive.share_path(3, 0, STALE), archive.share_path(3, 0, WRITER))
    with pytest.raises(ArchiveError, match=r"rank-0\.parquet: is not the file that its name says: .*learner-aaaaaaaa"):
        archive.share(3, 0, WRITER)
    shutil.copy(archive.share_path(3, 0, STALE), archive.share_path(3, 1, STALE))
    with pytest.raises(ArchiveError, match=r"rank-1\.parquet: is not the file that its name says: .*'rank': 0"):
        archive.share(3, 1, STALE)
    shutil.copy(archive.batch_path(3, STALE), archive.batch_path(3, WRITER))
    with pytest.raises(ArchiveError, match=r"json: is not the file that its name says: .*learner-aaaaaaaa"):
        archive.batch(3, WRITER)
    shutil.copy(archive.batch_path(3, STALE), archive.batch_path(4, STALE))
    with pytest.raises(ArchiveError, match=r"step-000004.*: is not the file that its name says"):
        archive.batch(4, STALE)
    assert archive.batch(3, STALE) == batch


def test_a_changed_advantage_is_found(tmp_path: Path) -> None:
    archive = opened(tmp_path / "run", stored=False)
    record = record_of(put(archive, 1, WRITER, 0))
    path = archive.batch_path(1, WRITER)
    path.write_text(path.read_text().replace('"advantage":1.5', '"advantage":-1.5', 1))
    point = find_start_point(archive, Checkpoints(archive), 1, {1: record})
    assert point.missing == {1: f"{path}: damaged (its content does not match its digest)"}


def test_facts_of_a_late_starter_do_not_count(tmp_path: Path, stored: bool) -> None:
    archive = opened(tmp_path / "run", stored=stored)
    recipe = parse_recipe(recipe_document("/model"))
    first, second, late = (
        RunFacts(run="run", recipe=recipe, model_path="/model", ranks=ranks, device="cpu", versions={})
        for ranks in (1, 2, 4)
    )
    archive.start(first, Fence(1, "learner-00000000"))
    archive.start(second, SUCCESSOR, resumed=True)
    archive.start(late, STALE, resumed=True)
    assert archive.facts() == second
    if stored:
        other = RunArchive(tmp_path / "other", run_mirror("run"))
        other.sync_with_store()
        assert other.facts() == second
    archive.delete_after(0, STALE, {})
    assert archive.facts() == second, "a successor's facts stay"
    newest = Fence(SUCCESSOR.epoch + 1, "learner-c")
    archive.start(late, newest, resumed=True)
    archive.delete_after(0, newest, {})
    names = {"run.json", facts_name(newest)}
    assert {path.name for path in archive.facts_files()} == names
    assert not stored or set(run_mirror("run").listed()) == names


@pytest.mark.parametrize("other", [SUCCESSOR, EQUAL], ids=["newer", "equal epoch"])
def test_a_late_first_starter_reports_its_successor(tmp_path: Path, stored: bool, other: Fence) -> None:
    """It read before its successor's first commit that nothing is committed: Redis has lost nothing."""
    archive = opened(tmp_path / "run", stored=stored)
    write_run(archive, other)
    before = durable(archive)
    facts = RunFacts(
        run="run",
        recipe=parse_recipe(recipe_document("/model")),
        model_path="/model",
        ranks=1,
        device="cpu",
        versions={},
    )
    with pytest.raises(
        ArchiveError, match=r"another learner of the run has written here since, so learner-aaaaaaaa was"
    ):
        archive.start(facts, STALE)
    assert durable(archive) == before


def test_the_newest_epoch_of_an_archive(tmp_path: Path, stored: bool) -> None:
    archive = opened(tmp_path / "run", stored=stored)
    assert archive.newest_epoch() == 0
    archive.write_record(record_of(draw_batch(RunKeys("run"), 0)[0], Fence(3, "learner-a")))
    assert archive.newest_epoch() == 3
    put(archive, 1, Fence(4, "learner-a"), 0)
    archive.set_aside(1, Fence(4, "learner-a"), Fence(4, "learner-a"))
    archive.delete_after(0, Fence(3, "learner-a"), {})
    assert archive.newest_epoch() == 4
    save(Checkpoints(archive), header(1, fence=Fence(12, "learner-a")), block_of(10))
    assert archive.newest_epoch() == 12
    recipe = parse_recipe(recipe_document("/model"))
    facts = RunFacts(run="run", recipe=recipe, model_path="/model", ranks=1, device="cpu", versions={})
    archive.start(facts, Fence(12345, "learner-a"), resumed=True)
    assert opened(tmp_path / ("other" if stored else "run"), stored=stored).newest_epoch() == 12345


def test_two_processes_with_one_id_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as first:
        first.write_text("first")
        with atomic_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "first")]


def test_a_file_that_another_process_deletes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = opened(tmp_path / "run", stored=False)
    put(archive, 1, WRITER, 0)
    unlink = Path.unlink

    def twice(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", twice)
    archive.delete_batches(1, WRITER)
    assert archive.batches() == []


def test_files_of_earlier_releases_are_read(tmp_path: Path) -> None:
    """Records and checkpoints without a learner in their names; shares and batches that do not say whose they are."""
    archive = opened(tmp_path / "run", stored=False)
    batch = put(archive, 3, WRITER, 2)
    path = archive.share_path(3, 0, WRITER)
    table = pq.ParquetFile(path).read()
    payloads = archive.share(3, 0, WRITER)
    from learner.archive.batch_files import DIGEST, _digest

    pq.write_table(table.replace_schema_metadata({DIGEST: _digest(table, b"")}), path)
    archive.batch_path(3, WRITER).write_text(batch.model_dump_json())
    assert archive.share(3, 0, WRITER).keys() == payloads.keys()
    assert archive.batch(3, WRITER) == batch
    record = record_of(batch)
    (archive.folder / "records/step-000003.json").write_text(record.model_dump_json())
    assert (archive.record(3), archive.trained()) == (record, {3: WRITER})
    assert archive.outdated_records([record]) == []
    assert resume(archive)._delete_after(3, [record], SUCCESSOR) == []
    assert archive.record(3) == record
    # The manifest alone names the learner.
    checkpoints = Checkpoints(archive)
    kept = save(checkpoints, header(3, fence=SUCCESSOR), block_of(10))
    old = checkpoints.path(kept).rename(archive.checkpoints / "step-000003-3f9a2c1b")
    document = json.loads((old / "checkpoint.json").read_text()) | {"name": old.name}
    from learner.checkpoint.manifest import _digest_of

    document["digest"] = _digest_of(json.dumps(document))
    (old / "checkpoint.json").write_text(json.dumps(document))
    assert [found.name for found in checkpoints.complete()] == [old.name]
    assert checkpoints.delete_after(2, WRITER) == []
    assert checkpoints.delete_after(2, SUCCESSOR) == [old.name]
