"""A full disk is a named wait with a deadline; other errors are raised at once."""

import asyncio
import errno
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner import storage_retry
from learner.storage_retry import retry_storage
from services.waits import Waits

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_retry, "RETRY_S", 0.1)


async def test_a_write_is_repeated_once_the_disk_has_room(tmp_path: Path) -> None:
    path, waits = tmp_path / "file", Waits()
    path.symlink_to(FULL)
    task = asyncio.create_task(retry_storage(lambda: path.write_text("text"), "the batch", waits, 60.0))
    ends = time.monotonic() + 30
    while not (found := waits.current(time.time() + 60)):
        assert time.monotonic() < ends, "no wait was listed within 30 s"
        await asyncio.sleep(0.05)
    [wait] = found
    assert wait.name == "disk"
    assert wait.waits_for.startswith("room on the disk for the batch: ")
    path.unlink()
    await asyncio.wait_for(task, 60.0)
    assert path.read_text() == "text"
    assert waits.current(time.time() + 60) == ()


def test_a_full_disk_is_a_wait_for_writers_of_shares_too(tmp_path: Path) -> None:
    path = tmp_path / "share"
    path.symlink_to(FULL)
    with pytest.raises(OSError, match="No space left") as found:
        pq.write_table(pa.table({"numbers": list(range(100))}), path)
    assert found.value.errno in storage_retry.DISK_FULL


async def test_a_full_disk_times_out_and_other_errors_fail_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="No space left") as found:
        await retry_storage(lambda: FULL.write_text("text"), "the batch", Waits(), 0.5)
    assert found.value.errno == errno.ENOSPC
    assert 0.4 < time.monotonic() - began < 60.0
    with pytest.raises(FileNotFoundError):
        await retry_storage(lambda: (tmp_path / "no" / "file").write_text(""), "the batch", Waits(), 60.0)
