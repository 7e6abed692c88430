"""Owns what a reader knows of the archive's files: which there are, local copies of those in a store, their indices.

Must not select a row. All of it is bounded: copies by their bytes, indices by their rows.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.storage.groups.parts import FOLDER, Part, list_parts
from services.storage.mirror import Mirror

CACHE = ".groups-cache"
"""In the run's folder: copies of files in the store. Nothing that starts with a dot is uploaded."""
CACHE_BYTES = 512 << 20
INDEXED_ROWS = 200_000
"""Rows whose indices are kept in memory: about 60 MB."""
LISTED_AGAIN_S = 5.0
"""How long a listing of a store counts; that of a folder counts until the folder changes."""
SETTLED_NS = 50_000_000
"""A folder that changed so recently may change again without a new time."""


class DamagedPartError(RuntimeError):
    """A file of the archive cannot be read. The text names it."""


class GonePartError(RuntimeError):
    """A file of the archive is gone: its rows were merged into another one, or the run is being deleted."""


@dataclass(frozen=True)
class PartIndex:
    """What is known of one file without its rows' content. The rows are sorted by group.

    `starts`: the first row of each row group, and the number of all rows.
    """

    path: Path
    metadata: Any
    groups: list[str]
    resumptions: list[int]
    archived_ms: list[int]
    starts: list[int]

    def rows_of(self, group: str) -> range:
        """The rows of a group."""
        first = bisect_left(self.groups, group)
        last = first
        while last < len(self.groups) and self.groups[last] == group:
            last += 1
        return range(first, last)

    def read(self, row_group: int, columns: list[str] | None = None) -> pa.Table:
        """A row group. Raises DamagedPartError, GonePartError."""
        return _reading(self.path, lambda: self._file().read_row_group(row_group, columns=columns))

    def _file(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, metadata=self.metadata)


def _reading(path: Path, read: Any) -> Any:
    try:
        return read()
    except FileNotFoundError:
        raise GonePartError(f"{path}: gone") from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamagedPartError(f"{path}: damaged ({' '.join(str(error).split())[:200]})") from None


def _index(path: Path) -> PartIndex:
    def read() -> PartIndex:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            table = file.read(columns=["group", "resumption", "archived_ms"])
        starts = [0]
        for number in range(metadata.num_row_groups):
            starts.append(starts[-1] + metadata.row_group(number).num_rows)
        groups, resumptions, archived_ms = (column.to_pylist() for column in table.columns)
        return PartIndex(path, metadata, groups, resumptions, archived_ms, starts)

    found: PartIndex = _reading(path, read)
    return found


class PartShelf:
    """The files of one run's archive. Safe to use from several threads; all methods block, and may raise StoreError."""

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        self._folder = folder
        self._mirror = mirror
        self._lock = threading.Lock()
        self._listed: list[Part] | None = None
        self._state: float = 0.0
        self._indices: OrderedDict[str, PartIndex] = OrderedDict()

    def parts(self, *, again: bool = False) -> list[Part]:
        """The files, the oldest first. `again`: do not use an earlier listing."""
        state = self._listing_state()
        with self._lock:
            if self._listed is not None and not again and self._is_current(state):
                return self._listed
        found = list_parts(self._folder, self._mirror)
        with self._lock:
            self._listed, self._state = found, state
        return found

    def _listing_state(self) -> float:
        """A folder's time of change (ns), or the time now (s)."""
        if self._mirror.remote:
            return time.monotonic()
        try:
            return (self._folder / FOLDER).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _is_current(self, state: float) -> bool:
        if self._mirror.remote:
            return state - self._state < LISTED_AGAIN_S
        return state == self._state and time.time_ns() - state > SETTLED_NS

    def index(self, part: Part) -> PartIndex:
        """The index of a file. Raises DamagedPartError, GonePartError."""
        with self._lock:
            if known := self._indices.get(part.name):
                self._indices.move_to_end(part.name)
        if known is not None and (not self._mirror.remote or known.path.exists()):
            return known
        found = _index(self._local(part))
        with self._lock:
            self._indices[part.name] = found
            self._indices.move_to_end(part.name)
            rows = sum(len(index.groups) for index in self._indices.values())
            while rows > INDEXED_ROWS and len(self._indices) > 1:
                _, oldest = self._indices.popitem(last=False)
                rows -= len(oldest.groups)
        return found

    def _local(self, part: Part) -> Path:
        if not self._mirror.remote:
            return self._folder / part.path
        cache = self._folder / CACHE
        try:
            self._mirror.fetch({part.path: part.size}, cache)
        except OSError:
            if part not in self.parts(again=True):
                raise GonePartError(f"{part.name}: gone") from None
            raise
        path = cache / part.path
        path.touch()
        self._make_room(path)
        return path

    def _make_room(self, newest: Path) -> None:
        """Delete the copies that were used least recently, beyond CACHE_BYTES in all; never the newest."""
        with self._lock:
            files = {path: path.stat() for path in newest.parent.glob("[!.]*") if path != newest}
            free = CACHE_BYTES - newest.stat().st_size - sum(facts.st_size for facts in files.values())
            for path in sorted(files, key=lambda path: files[path].st_mtime):
                if free >= 0:
                    break
                free += files[path].st_size
                path.unlink(missing_ok=True)
