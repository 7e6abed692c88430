"""A checkpoint is complete or absent, whatever fails while it is written: the disk, or the process at any call."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointError
from tests.learner import crashing
from tests.learner.checkpointing import NEVER, archive_with, block_of, header, names, save
from tests.learner.committed import WRITER
from tests.learner.running import ROOT

pytestmark = pytest.mark.timeout(400)
STEPS = 4


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    return archive_with(tmp_path / "run", STEPS)


@pytest.fixture
def checkpoints(archive: RunArchive) -> Checkpoints:
    return Checkpoints(archive)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """A separate small file system at `folder`."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a full disk needs a file system that may be mounted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_fails_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", 4):
        archive = archive_with(tmp_path / "run", 3)
        checkpoints = Checkpoints(archive)
        first = save(checkpoints, header(1), block_of(400_000))
        name = checkpoints.partial.start(2, WRITER)
        with pytest.raises(CheckpointError, match=r"rank-0001.*could not be written \(No space left on device\)"):
            checkpoints.partial.write(name, 1, block_of(800_000), NEVER)
        # Rank 0 gets the failure from the other rank's report, long before its deadline.
        checkpoints.partial.write(name, 0, block_of(100), NEVER)
        with pytest.raises(CheckpointError, match=r"rank-0001.*No space left on device"):
            checkpoints.commit(name, header(2, ranks=2), NEVER)
        assert (names(archive), checkpoints.newest_intact(3)) == ([first.name], (first, {}))
        fill(tmp_path / "run/full")
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(checkpoints, header(2), block_of(100_000))
        left = set(names(archive)) - {first.name}
        (tmp_path / "run/full").unlink()
        # A disk this full has no room for a report either: the rank's own service abandons the checkpoint.
        for partial in left:
            checkpoints.partial.abandon(partial.removeprefix("."))
        another = save(checkpoints, header(3), block_of(1000))
        assert names(archive) == [first.name, another.name]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        _write_on(file)


def _write_on(file: Any) -> None:
    while True:
        file.write(bytes(4096))


def test_a_file_that_grows_too_large_fails_the_checkpoint_too(archive: RunArchive, checkpoints: Checkpoints) -> None:
    first = save(checkpoints, header(1), block_of(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        name = checkpoints.partial.start(2, WRITER)
        with pytest.raises(CheckpointError, match=r"could not be written \(File too large\)"):
            checkpoints.partial.write(name, 0, block_of(1_000_000), NEVER)
        with pytest.raises(CheckpointError, match=r"could not be written \(File too large\)"):
            checkpoints.commit(name, header(2), NEVER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(archive) == [first.name]


def test_a_folder_that_cannot_be_made_fails_the_checkpoint(archive: RunArchive, checkpoints: Checkpoints) -> None:
    shutil.rmtree(archive.checkpoints)
    archive.checkpoints.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written \(Not a directory\)"):
        checkpoints.partial.start(2, WRITER)


def test_after_a_kill_during_a_write_the_previous_one_is_used(archive: RunArchive, checkpoints: Checkpoints) -> None:
    before = save(checkpoints, header(2), block_of(1000))
    code = f"from tests.learner.crashing import write_forever; write_forever({str(archive.folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        partial = being_written(archive, process)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert checkpoints.newest_intact(STEPS) == (before, {})
    assert checkpoints.clear_interrupted(WRITER) == [partial]
    after = save(checkpoints, header(4), block_of(1000))
    assert names(archive) == [before.name, after.name]


def being_written(archive: RunArchive, process: subprocess.Popen[bytes]) -> str:
    """The name of the partial checkpoint's folder, once more than 1 MiB of its file is on the disk."""
    ends = time.monotonic() + 240
    while True:
        for file in archive.checkpoints.glob(".*/rank-0000.safetensors"):
            if file.stat().st_size > 1 << 20:
                return file.parent.name
        assert process.poll() is None, "the writer ended"
        assert time.monotonic() < ends, "the writer wrote less than 1 MiB in 240 s"
        time.sleep(0.01)


def test_dying_at_any_call_leaves_only_intact_checkpoints(tmp_path: Path) -> None:
    folder = archive_with(tmp_path / "run", 3).folder
    for step in (1, 2):
        crashing.write(folder, step)
    found = subprocess.run(
        [sys.executable, "-m", "tests.learner.crashing", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    *deaths, calls = found.stdout.splitlines()
    # The old checkpoints survive each death before the rename; the new one exists after each later death.
    renamed = calls.split().index("rename")
    assert len(deaths) == len(calls.split()) >= 20
    assert set(deaths[: renamed + 1]) == {"1,2"}
    assert deaths[renamed + 1] == "1,2,3"
    assert set(deaths[renamed + 1 :]) <= {"1,2,3", "2,3"}
    # Content, then names, then the rename that completes the checkpoint, all before any deletion.
    assert calls.split()[renamed - 1 : renamed + 3] == ["fsync", "rename", "fsync", "unlink"]
