"""The archive of groups: what is written is found, by id and by search, in a folder and in a store."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from services.contracts import Lane, Outcome, Prompt, VersionSpan
from services.storage.errors import StoreError
from services.storage.groups import columns, listing, merging, parts, reader
from services.storage.groups.filters import SampleFilter, SearchPlace
from services.storage.groups.listing import CACHE, DamagedPartError
from services.storage.groups.merging import merge_once, next_merge
from services.storage.groups.parts import list_parts, parse_part, write_part
from services.storage.groups.reader import GroupArchive
from services.storage.groups.story import ArchivedGroup, ArchivedSample, GroupRow, GroupTokens
from services.storage.mirror import NO_MIRROR, Mirror, StoredMirror, run_mirror
from services.storage.places import StoreAddress
from services.storage.removal import delete_run_files
from tests.harness.each import each
from tests.harness.servers.s3_server import S3Server

SAMPLES = 3


def row(number: int, at_ms: int, resumption: int = 0, **changes: object) -> GroupRow:
    """A group whose sample n has the text `g<number> sample n` and the score n / 4; the first one is correct."""
    group = str(changes.pop("group", f"g{number:08d}"))
    samples = tuple(
        ArchivedSample(
            index=index,
            outcome=Outcome.WRONG if index else Outcome.CORRECT,
            score=index / 4,
            rewards={"style": 1 - index / 4},
            reward=-1.0 if index else 1.0,
            advantage=0.25,
            text=f"{group} sample {index}: Zwölf",
            finish_reason="stop",
            spans=(VersionSpan(version=number // 10, start=0, end=index + 1),),
        )
        for index in range(SAMPLES)
    )
    prompt = Prompt(
        id=f"p{number % 5}", messages=({"role": "user", "content": "1 + 1"},), verifier="v", reference={"answer": 2}
    )
    values = {"release": "trained", "step": number // 10, "version": number // 10, "staleness": 1, **changes}
    found = ArchivedGroup.model_validate(
        {"lane": "train", **values, "group": group, "resumption": resumption, "archived_ms": at_ms, "samples": samples}
        | {"prompt": prompt}
    )
    ids = tuple(np.arange(index + 1, dtype=np.int32) for index in range(SAMPLES))
    return GroupRow(found, GroupTokens(np.array([7, 8], np.int32), ids, tuple(-ids[0] - a / 2 for a in ids)))


def filled(folder: Path, groups: int = 60, per_part: int = 6, mirror=NO_MIRROR) -> GroupArchive:
    """An archive of training groups, in files of neighbours, each file later than the one before."""
    for start in range(0, groups, per_part):
        rows = [row(number, 1000 + start) for number in range(start, min(groups, start + per_part))]
        write_part(folder, mirror, rows)
    return GroupArchive(folder, mirror)


def everything(archive: GroupArchive, limit: int = 7, **wanted: object) -> list[tuple[str, int]]:
    """All pages of a search, as (group, index)."""
    found, cursor = [], ""
    for _ in range(1000):
        page = archive.search(SampleFilter(**wanted), cursor, limit)
        assert len(page.samples) <= limit
        found += [(sample.group, sample.index) for sample in page.samples]
        if page.cursor is None:
            return found
        cursor = page.cursor
    raise AssertionError("a search that never ends")


@pytest.fixture
def stored(store: S3Server) -> Mirror:
    """The mirror of a run in a store."""
    return run_mirror("run")


def test_a_group_is_told_as_it_was_written(tmp_path: Path):
    written = row(3, 1000, reason="kept", set="", evaluation="")
    write_part(tmp_path, NO_MIRROR, [row(1, 1000), written, row(2, 1000)])
    story = GroupArchive(tmp_path).find("g00000003")
    assert story is not None
    assert ArchivedGroup.model_validate(story.model_dump()) == written.group
    assert story.attempts == (0,)
    assert story.prompt_ids == (7, 8)
    assert story.response_ids == ((0,), (0, 1), (0, 1, 2))
    assert story.behaviour_logprobs == ((0.0,), (0.0, -0.5), (0.0, -0.5, -1.0))
    assert story.prompt == written.group.prompt


def test_a_group_without_payloads_and_verdicts_is_told(tmp_path: Path):
    bare = ArchivedGroup(group="g1", lane=Lane.TRAIN, resumption=0, release="dead", reason="lost", archived_ms=5)
    write_part(tmp_path, NO_MIRROR, [GroupRow(bare)])
    story = GroupArchive(tmp_path).find("g1")
    assert story is not None
    assert (story.samples, story.prompt, story.reason, story.response_ids) == ((), None, "lost", ())


def test_every_group_is_found_and_no_other(tmp_path: Path):
    archive = filled(tmp_path)
    for number in range(60):
        story = archive.find(f"g{number:08d}")
        assert story is not None
        assert story.samples[1].text == f"g{number:08d} sample 1: Zwölf"
    assert archive.find("g00000060") is None
    assert archive.find("../g") is None
    assert GroupArchive(tmp_path / "none").find("g00000001") is None
    assert everything(GroupArchive(tmp_path / "none")) == []


def test_each_attempt_is_told_and_the_last_one_counts(tmp_path: Path):
    write_part(tmp_path, NO_MIRROR, [row(1, 1000, step=9), row(2, 1000)])
    archive = GroupArchive(tmp_path)
    write_part(tmp_path, NO_MIRROR, [row(1, 2000, resumption=3, step=4)])
    story, first = archive.find("g00000001"), archive.find("g00000001", 0)
    assert story is not None
    assert first is not None
    assert (story.step, story.attempts, first.step) == (4, (0, 3), 9)
    assert archive.find("g00000001", 1) is None


def test_a_row_that_was_written_twice_counts_once(tmp_path: Path):
    write_part(tmp_path, NO_MIRROR, [row(1, 1000, reason="first"), row(2, 1000)])
    write_part(tmp_path, NO_MIRROR, [row(1, 2000, reason="again"), row(3, 2000)])
    archive = GroupArchive(tmp_path)
    story = archive.find("g00000001")
    assert story is not None
    assert (story.reason, story.attempts) == ("again", (0,))
    groups = [group for group, index in everything(archive) if index == 0]
    assert groups == ["g00000001", "g00000003", "g00000002"]


ALL = [
    (f"g{number:08d}", index) for start in range(54, -1, -6) for number in range(start, start + 6) for index in range(3)
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ALL),
        ({"outcome": "correct"}, [found for found in ALL if found[1] == 0]),
        ({"least": 0.25}, [found for found in ALL if found[1] > 0]),
        ({"least": 0.25, "most": 0.25}, [found for found in ALL if found[1] == 1]),
        ({"reward": "style", "most": 0.5}, [found for found in ALL if found[1] == 2]),
        ({"reward": "absent"}, []),
        ({"reward": "absent", "least": 0.0}, []),
        ({"step": 3}, [found for found in ALL if 30 <= int(found[0][1:]) < 40]),
        ({"version": 5, "outcome": "correct"}, [found for found in ALL if int(found[0][1:]) >= 50 and found[1] == 0]),
        ({"prompt": "p2"}, [found for found in ALL if int(found[0][1:]) % 5 == 2]),
        ({"prompt": "p7"}, []),
        ({"text": "SAMPLE 2: ZWÖLF"}, [found for found in ALL if found[1] == 2]),
        ({"text": "g00000017"}, [found for found in ALL if found[0] == "g00000017"]),
        ({"lane": "train", "release": "trained", "step": 0}, [found for found in ALL if int(found[0][1:]) < 10]),
        ({"lane": "evaluation"}, []),
        ({"release": "dead"}, []),
        ({"set": "held-out"}, []),
    ],
)
def test_a_search_finds_what_it_names(tmp_path: Path, wanted: dict, expected: list):
    archive = filled(tmp_path)
    assert everything(archive, **wanted) == expected
    while merge_once(tmp_path, NO_MIRROR):
        pass
    assert everything(archive, **wanted) == expected, "of files that were merged"


def test_lanes_are_searched_one_after_the_other(tmp_path: Path):
    for step in range(20):
        write_part(tmp_path, NO_MIRROR, [row(step, 1000 + 10 * step)])
        name = f"e.held-out.step-{step}.000001"
        released = {"lane": "evaluation", "release": "evaluated", "set": "held-out", "evaluation": f"step-{step}"}
        write_part(tmp_path, NO_MIRROR, [row(step, 1005 + 10 * step, group=name, **released)])
    archive = GroupArchive(tmp_path)
    before = everything(archive, 5)
    assert [group for group, index in before if index == 0] == [
        *(f"g{step:08d}" for step in range(19, -1, -1)),
        *(f"e.held-out.step-{step}.000001" for step in range(19, -1, -1)),
    ]
    assert len(everything(archive, evaluation="step-4")) == SAMPLES
    assert merge_once(tmp_path, NO_MIRROR)
    assert merge_once(tmp_path, NO_MIRROR)
    assert everything(archive, 5) == before


def test_a_call_reads_a_bounded_number_of_groups(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(reader, "MOST_WORK", 40)
    archive = filled(tmp_path)
    page = archive.search(SampleFilter(text="nowhere"))
    assert page.samples == ()
    assert 0 < page.groups < 40
    assert page.cursor is not None
    assert everything(archive, text="sample 1") == [found for found in ALL if found[1] == 1]


def test_a_page_goes_on_while_groups_are_added(tmp_path: Path):
    archive = filled(tmp_path)
    first = archive.search(SampleFilter(), "", 10)
    write_part(tmp_path, NO_MIRROR, [row(70, 9000)])
    second = archive.search(SampleFilter(), first.cursor or "", 500)
    assert [(found.group, found.index) for page in (first, second) for found in page.samples] == ALL
    assert second.cursor is None


@each("cursor", ["x", "1.2", "1.0.a/b", "1" * 40 + ".0.g1", "-1.0.g1"])
def test_an_unknown_cursor_is_refused(tmp_path: Path, cursor: str):
    with pytest.raises(ValueError, match=r"^cursor: .* is not valid: expected the cursor of the previous answer"):
        GroupArchive(tmp_path).search(SampleFilter(), cursor)


def test_a_cursor_is_the_place_that_it_names():
    place = SearchPlace(1795396858610, "e.held-out.step-5.000012", 15)
    assert SearchPlace.parse(place.cursor) == place


def test_many_small_files_become_few(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(merging, "TOGETHER", 4)
    archive = filled(tmp_path, groups=66, per_part=2)
    write_part(tmp_path, NO_MIRROR, [row(1, 5000, reason="again")])
    merges = 0
    while merge_once(tmp_path, NO_MIRROR):
        merges += 1
    left = list_parts(tmp_path, NO_MIRROR)
    assert merges == 10
    assert [part.level for part in left] == [2, 2, 0, 0]
    assert sorted(path.name for path in (tmp_path / parts.FOLDER).iterdir()) == sorted(part.name for part in left)
    assert sorted(set(everything(archive))) == sorted(ALL + [(f"g{n:08d}", i) for n in range(60, 66) for i in range(3)])
    assert len(everything(archive)) == 66 * SAMPLES, "the older row of g1 is not found"


def test_files_of_an_older_release_are_read_and_merged(tmp_path: Path, monkeypatch):
    with monkeypatch.context() as older:
        kept = [field for field in columns.SCHEMA if field.name != "optimizer_step"]
        older.setattr(columns, "SCHEMA", pa.schema(kept))
        older.setattr(columns, "UNTIL_TOKENS", [name for name in columns.UNTIL_TOKENS if name != "optimizer_step"])
        write_part(tmp_path, NO_MIRROR, [row(1, 1000, optimizer_step=2)])
    write_part(tmp_path, NO_MIRROR, [row(2, 1001, optimizer_step=2)])
    archive = GroupArchive(tmp_path)

    def numbers():
        stories = [archive.find(f"g{number:08d}") for number in (1, 2)]
        return [story.optimizer_step if story else "lost" for story in stories]

    assert numbers() == [None, 2]
    assert len(everything(archive)) == 2 * SAMPLES
    monkeypatch.setattr(merging, "TOGETHER", 2)
    assert merge_once(tmp_path, NO_MIRROR)
    assert numbers() == [None, 2]


def test_big_files_are_not_merged(monkeypatch):
    monkeypatch.setattr(merging, "TOGETHER", 2)
    monkeypatch.setattr(merging, "MOST_BYTES", 100)
    sizes = [90, 20, 60, 30]
    names = [f"g1_g2_{at + 1:013d}-0-{'0' * 8}.parquet" for at in range(4)]
    found = [part for name, size in zip(names, sizes, strict=True) if (part := parse_part(name, size))]
    assert [part.size for part in next_merge(found)] == [20, 60]


def test_a_reader_survives_a_merge(tmp_path: Path):
    archive = filled(tmp_path, groups=96)
    assert archive.find("g00000001")
    known = archive._shelf.parts()
    assert merge_once(tmp_path, NO_MIRROR)
    archive._shelf._listed, archive._shelf._state = known, (tmp_path / parts.FOLDER).stat().st_mtime_ns
    archive._shelf._indices.clear()
    story = archive.find("g00000001")
    assert story is not None, "the listing was out of date"


def test_threads_read_while_files_are_written_and_merged(tmp_path: Path):
    archive, failed, stop = filled(tmp_path, groups=6), [], threading.Event()

    def read():
        while not stop.is_set():
            try:
                assert archive.find("g00000003")
                assert ("g00000003", 0) in everything(archive, outcome="correct")
            except Exception as error:  # noqa: BLE001 - the test reports it
                failed.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(6, 70):
        write_part(tmp_path, NO_MIRROR, [row(number, 2000 + number)])
        merge_once(tmp_path, NO_MIRROR)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failed == []


def test_a_damaged_file_is_named_and_hides_no_other(tmp_path: Path):
    archive = filled(tmp_path, groups=18)
    [_, damaged, _] = list_parts(tmp_path, NO_MIRROR)
    (tmp_path / damaged.path).write_bytes(b"PAR1 nothing PAR1")
    assert archive.find("g00000001")
    with pytest.raises(DamagedPartError, match=damaged.name):
        archive.find("g00000008")
    page = archive.search(SampleFilter(), "", 100)
    assert len(page.samples) == 12 * SAMPLES
    assert [damaged.name in line for line in page.damaged] == [True]


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    class Full(StoredMirror):
        def put(self, name, path, stop=None):
            raise StoreError("full")

    with pytest.raises(StoreError, match="full"):
        write_part(tmp_path, Full(StoreAddress("bucket", "x")), [row(1, 1000)])
    assert list((tmp_path / parts.FOLDER).iterdir()) == []


def test_names_of_other_files_are_no_parts():
    for name in (".g1_g2_1795396858610-0-00000000.parquet", "run.json", "g1_g2_17-0-0000000.parquet", "a_b_c.parquet"):
        assert parse_part(name, 1) is None


def test_an_archive_in_a_store_is_read_through_a_bounded_cache(tmp_path: Path, stored: Mirror, monkeypatch):
    archive = filled(tmp_path / "reader", groups=18, mirror=stored)
    assert list((tmp_path / "reader" / parts.FOLDER).iterdir()) == [], "no copy stays with the writer"
    assert len(everything(archive)) == 18 * SAMPLES
    cache = tmp_path / "reader" / CACHE / parts.FOLDER
    assert len(list(cache.glob("[!.]*"))) == 3
    monkeypatch.setattr(listing, "CACHE_BYTES", max(path.stat().st_size for path in cache.glob("[!.]*")))
    archive = GroupArchive(tmp_path / "reader", stored)
    for path in cache.glob("[!.]*"):
        path.unlink()
    for number in (1, 8, 15, 1):
        assert archive.find(f"g{number:08d}")
    assert len(list(cache.glob("[!.]*"))) == 1


def test_files_in_a_store_are_merged(tmp_path: Path, stored: Mirror):
    archive = filled(tmp_path, groups=48, per_part=3, mirror=stored)
    assert merge_once(tmp_path, stored)
    [merged] = list_parts(tmp_path, stored)
    assert (merged.level, merged.first, merged.last) == (1, "g00000000", "g00000047")
    assert sorted(everything(archive)) == sorted(found for found in ALL if int(found[0][1:]) < 48)


def test_a_run_is_deleted_with_its_archive(tmp_path: Path):
    filled(tmp_path / "run")
    delete_run_files(tmp_path, "run")
    assert not (tmp_path / "run").exists()
