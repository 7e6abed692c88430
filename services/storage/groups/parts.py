"""Owns the files of the archive: their names, and how one is written, completely or not at all.

Must not read a row.

    groups/g00000001_g00000187_1795396858610-0-3f2a.parquet     FIRST_LAST_MILLISECONDS-LEVEL-RANDOM

FIRST and LAST are the lowest and the highest id of its groups, which are sorted and of one lane. MILLISECONDS: when it
was archived; of a merged file, its newest row. No two samplers choose the same name.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from services.storage.groups.columns import ORDERED, to_table
from services.storage.groups.story import GroupRow
from services.storage.mirror import Mirror

FOLDER = "groups"
GROUP_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")
"""Ids of groups. Neither these nor a number has an underscore."""
NAME = re.compile(
    r"(?P<first>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<last>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<at_ms>\d{13,})-(?P<level>\d)-[0-9a-f]{8}\.parquet"
)
ROW_GROUP_BYTES, LEAST_ROWS, MOST_ROWS = 1 << 20, 4, 64
"""A row group is what a reader reads of a file to find one group: about so many bytes, and between these rows."""


def of_evaluation(group: str) -> bool:
    """Whether an id is that of an evaluation group; ids of training groups never start so."""
    return group.startswith("e.")


class Part(NamedTuple):
    """One file. `first`, `last`: ids of groups; `at_ms`: of its newest row; `level`: how often its rows were merged."""

    name: str
    first: str
    last: str
    at_ms: int
    level: int
    size: int

    @property
    def path(self) -> str:
        """Its name in the run's folder."""
        return f"{FOLDER}/{self.name}"

    @property
    def evaluation(self) -> bool:
        """Whether it has groups of evaluations; otherwise it has training groups."""
        return of_evaluation(self.first)

    def may_have(self, group: str) -> bool:
        """Whether its range of ids includes the group's."""
        return self.first <= group <= self.last


def parse_part(name: str, size: int) -> Part | None:
    """The part of a file's name; None for another file, such as one that is being written."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    return Part(name, match["first"], match["last"], int(match["at_ms"]), int(match["level"]), size)


def list_parts(folder: Path, mirror: Mirror) -> list[Part]:
    """All files of the archive, the oldest first: those in the store or, without one, in the run's `folder`.

    Raises StoreError, OSError.
    """
    if mirror.remote:
        found = {name.rpartition("/")[2]: size for name, size in mirror.listed(FOLDER).items()}
    else:
        found = _files(folder / FOLDER)
    parts = (parse_part(name, size) for name, size in found.items())
    return sorted(filter(None, parts), key=lambda part: (part.at_ms, part.name))


def _files(folder: Path) -> dict[str, int]:
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    found[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # merged meanwhile
                    continue
    except FileNotFoundError:
        return {}
    return found


def write_part(folder: Path, mirror: Mirror, rows: Sequence[GroupRow]) -> str:
    """Write rows of one lane, which have one `archived_ms`, and return the file's name. Durable when this returns.

    Raises StoreError, OSError; then there is no such file.
    """
    return write_table(folder, mirror, to_table(sorted(rows, key=lambda row: row.group.group)), 0)


def write_table(folder: Path, mirror: Mirror, table: pa.Table, level: int) -> str:
    """Write a table of the archive, sorted by group; see `write_part`."""
    groups = table.column("group")
    newest = max(table.column("archived_ms").to_pylist())
    name = f"{groups[0]}_{groups[-1]}_{newest:013d}-{level}-{secrets.token_hex(4)}.parquet"
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    partial = place / f".{name}"
    rows = ROW_GROUP_BYTES * table.num_rows // max(1, table.nbytes)
    try:
        pq.write_table(
            table,
            partial,
            compression="zstd",
            row_group_size=min(MOST_ROWS, max(LEAST_ROWS, rows)),
            write_statistics=ORDERED,
            use_dictionary=["lane", "release", "evaluation", "set"],
        )
        _put(partial, place / name, mirror)
    finally:
        partial.unlink(missing_ok=True)
    return name


def _put(partial: Path, path: Path, mirror: Mirror) -> None:
    """Make a written file durable: in the store, where then no copy stays here, or under its name."""
    if mirror.remote:
        mirror.put(f"{FOLDER}/{path.name}", partial)
        return
    _synchronise(partial, os.O_RDONLY)
    partial.replace(path)
    _synchronise(path.parent, os.O_RDONLY | os.O_DIRECTORY)


def _synchronise(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def delete_parts(folder: Path, mirror: Mirror, parts: Sequence[Part]) -> None:
    """Delete files whose rows are in another one. Raises StoreError, OSError."""
    if mirror.remote:
        mirror.delete([part.path for part in parts])
    for part in parts:
        (folder / part.path).unlink(missing_ok=True)
