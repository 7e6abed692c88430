"""Owns how ranks report to rank 0 that they wrote their files of a checkpoint, through its folder or the store.

Must not know what the files hold, nor commit a checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from learner.archive import ArchiveError, read_message, write_message
from learner.checkpoint.manifest import STATE_SUFFIX, CheckpointError
from services.contracts import Value
from services.retry import Retry
from services.storage.errors import StoreOutageError
from services.storage.facts import FileFacts
from services.storage.mirror import Mirror

log = logging.getLogger(__name__)

RETRY_FOR_S, RETRY_EVERY_S = 120.0, 5.0
"""How long a rank retries while the store is unavailable and other ranks wait for it, and the pause between retries."""


class RankReport(Value):
    """rank-0001.json, until all ranks have reported: the files that the rank wrote, by name, or why it could not."""

    files: dict[str, FileFacts] = Field(default_factory=dict)
    error: str = ""


def state_file(rank: int) -> str:
    """The name of a rank's tensor file."""
    return f"rank-{rank:04d}{STATE_SUFFIX}"


def report_file(rank: int) -> str:
    """The name of a rank's report file."""
    return f"rank-{rank:04d}.json"


class RankReports(Protocol):
    """Where the ranks report on one checkpoint."""

    poll_s: float

    def write(self, rank: int, report: RankReport) -> None:
        """Write a rank's report. Raises OSError."""

    def read(self, ranks: Collection[int]) -> dict[int, tuple[RankReport, int]]:
        """The reports of the `ranks` that have reported, each with the size in bytes of the rank's tensor file."""

    def delete(self, ranks: Collection[int]) -> None:
        """Delete the reports."""


class FolderReports:
    """Reports in a folder that all ranks see."""

    poll_s = 0.1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, rank: int, report: RankReport) -> None:
        """See RankReports."""
        write_message(self._folder / report_file(rank), report)

    def read(self, ranks: Collection[int]) -> dict[int, tuple[RankReport, int]]:
        """See RankReports. Raises OSError, ArchiveError."""
        reported = [rank for rank in ranks if (self._folder / report_file(rank)).exists()]
        reports = {rank: read_message(self._folder / report_file(rank), RankReport) for rank in reported}
        return {rank: (report, self._size(rank) if report.files else 0) for rank, report in reports.items()}

    def _size(self, rank: int) -> int:
        return (self._folder / state_file(rank)).stat().st_size

    def delete(self, ranks: Collection[int]) -> None:
        """See RankReports."""
        for rank in ranks:
            (self._folder / report_file(rank)).unlink()


class StoredReports:
    """Reports in the store; each rank sees only its own node and the store."""

    poll_s = 1.0

    def __init__(self, mirror: Mirror, under: str) -> None:
        self._mirror = mirror
        self._under = under

    def write(self, rank: int, report: RankReport) -> None:
        """See RankReports."""
        self._mirror.put_bytes(f"{self._under}/{report_file(rank)}", report.model_dump_json().encode())

    def read(self, ranks: Collection[int]) -> dict[int, tuple[RankReport, int]]:
        """See RankReports. Raises StoreError, ArchiveError."""
        try:
            listed = self._mirror.listed(self._under)
            names = {rank: f"{self._under}/{report_file(rank)}" for rank in ranks}
            contents = {rank: self._mirror.read(name) for rank, name in names.items() if name in listed}
        except StoreOutageError as error:
            log.warning("reading the ranks' reports on a checkpoint failed: %s; retrying", error)
            return {}
        return {
            rank: (_parse(content, names[rank]), listed.get(f"{self._under}/{state_file(rank)}", 0))
            for rank, content in contents.items()
        }

    def delete(self, ranks: Collection[int]) -> None:
        """See RankReports."""
        self._mirror.delete([f"{self._under}/{report_file(rank)}" for rank in ranks])


def _parse(content: bytes, name: str) -> RankReport:
    try:
        return RankReport.model_validate_json(content)
    except ValidationError:
        raise ArchiveError(f"{name}: damaged") from None


def collect_files(reports: RankReports, ranks: int, stop: threading.Event, deadline_s: float) -> dict[str, FileFacts]:
    """Wait for the reports of all ranks, delete them, and return the files that they name.

    Raises CheckpointError if a rank failed or exceeds the deadline, or once `stop` is set; OSError, ArchiveError.
    """
    ends = time.monotonic() + deadline_s
    missing = set(range(ranks))
    files: dict[str, FileFacts] = {}
    while True:
        for rank, (report, size) in reports.read(sorted(missing)).items():
            files |= _checked(rank, report, size)
            missing.remove(rank)
        if not missing:
            break
        if time.monotonic() > ends:
            raise CheckpointError(f"ranks {sorted(missing)} did not write their files within {deadline_s:g} s")
        if stop.wait(reports.poll_s):
            raise CheckpointError("the learner is stopping")
    retry_during_outage(lambda: reports.delete(range(ranks)), stop)
    return files


def retry_during_outage(operation: Callable[[], None], stop: threading.Event, bound_s: float = RETRY_FOR_S) -> None:
    """Run `operation`, with retries for `bound_s` seconds while the store is unavailable, or until `stop` is set.

    Raises its last error.
    """
    outages = Retry(lambda error: isinstance(error, StoreOutageError), RETRY_EVERY_S, bound_s)
    outages.run(operation, stop.wait)


def _checked(rank: int, report: RankReport, size: int) -> dict[str, FileFacts]:
    if report.error:
        raise CheckpointError(report.error)
    written = report.files[state_file(rank)].size
    if size != written:
        raise CheckpointError(f"{state_file(rank)}: has {size} bytes, but {written} were written")
    return report.files
