"""Owns reading Arrow data: Parquet files, and dataset folders as Hugging Face's `datasets` saves them.

Must not hold a whole file in memory: Parquet is read in batches, needed columns only; Arrow files are memory-mapped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from services.sampler.data.opening import open_rows, part_of
from services.sampler.data.rows import Columns, DataError, Row
from services.settings.faults import shown

BATCH_ROWS = 4096
BUFFER_BYTES = 1 << 20
# train.parquet, train-00000-of-00002.parquet. The split of a file called 0000.parquet is the name of its folder.
SPLIT_FILE = re.compile(r"(?P<split>.*?)(?:-\d+-of-\d+.*)?")
EXPECTED = "expected a folder that datasets.save_to_disk wrote, or a folder of Parquet files"


def parquet(path: Path, name: str, split: str | None, columns: Columns) -> Iterator[Row]:
    """Rows of a Parquet file, or of all Parquet files directly in a folder, sorted by name. Raises DataError."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{name} is not valid: expected a folder with .parquet files")
    for file in files:
        yield from _parquet_rows(file, name if file == path else f"{name} {file.name!r}", columns)


def dataset(path: Path, name: str, split: str | None, columns: Columns) -> Iterator[Row]:
    """Rows of one split of a dataset folder; `split` may be None if the folder has only one. Raises DataError."""
    if not path.is_dir():
        raise DataError(f"{name} is not valid: {EXPECTED}; it is not a folder")
    if (path / "dataset_dict.json").is_file():
        path = part_of(path, _chosen(_json(path / "dataset_dict.json", name).get("splits", []), split, name), name)
        split = None  # chosen above; state.json of the part may still have the name of an earlier split
    if (path / "state.json").is_file():
        yield from _saved_rows(path, name, split, columns)
        return
    by_split = _by_split(path)
    if not by_split:
        raise DataError(f"{name} is not valid: {EXPECTED}; it has no dataset")
    files = by_split[_chosen(list(by_split), split, name)]
    folders = sorted({str(file.parent.relative_to(path)) for file in files})
    if len(folders) > 1:
        raise DataError(f"{name} is not valid: expected the path of one dataset; it has several: {', '.join(folders)}")
    for file in files:
        yield from _parquet_rows(file, f"{name} {file.name!r}", columns)


def _by_split(path: Path) -> dict[str, list[Path]]:
    """The Parquet files of a folder and its subfolders, by split."""
    found: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*.parquet")):
        match = SPLIT_FILE.fullmatch(file.stem)
        split = match["split"] if match else file.stem
        found.setdefault(file.parent.name if split.isdecimal() else split, []).append(file)
    return found


def _chosen(splits: list[str], split: str | None, name: str) -> str:
    """The requested split, or the only one. Raises DataError if it is ambiguous or missing."""
    available = ", ".join(map(repr, splits))
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        raise DataError(f"{name}: split {shown(split)} is not valid: expected one of {available}")
    return split


def _saved_rows(path: Path, name: str, split: str | None, columns: Columns) -> Iterator[Row]:
    """Rows of a folder with `state.json`: its Arrow streams in the order that this file lists."""
    state = _json(path / "state.json", name)
    if split is not None and (own := state.get("_split")) != split:
        raise DataError(f"{name}: split {shown(split)} is not valid: expected null, because it has only split {own!r}")
    for entry in state.get("_data_files", []):
        file = part_of(path, entry["filename"], name)
        yield from _arrow_rows(file, f"{name} {file.name!r}", columns)


def _json(file: Path, name: str) -> dict[str, Any]:
    try:
        with open_rows(file, name) as opened:
            return dict(json.load(opened))
    except OSError as error:
        raise DataError(f"{name} {file.name!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} {file.name!r} cannot be read as a JSON object ({type(error).__name__})") from None


def _parquet_rows(file: Path, name: str, columns: Columns) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        # A small buffer: by default pyarrow loads the columns of a whole row group at once.
        with open_rows(file, name) as opened, ParquetFile(opened, pre_buffer=False, buffer_size=BUFFER_BYTES) as table:
            chosen = _available(columns, table.schema_arrow.names, name)
            yield from _rows(table.iter_batches(batch_size=BATCH_ROWS, columns=chosen), name)
    except (OSError, ArrowException) as error:
        raise DataError(f"{name} cannot be read as Parquet: {error}") from None


def _arrow_rows(file: Path, name: str, columns: Columns) -> Iterator[Row]:
    import pyarrow as pa

    try:
        open_rows(file, name).close()  # checked, and then mapped by its name: pyarrow maps no open file
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            top = _top_level(_available(columns, stream.schema.names, name), stream.schema.names)
            yield from _rows((batch.select(top) for batch in stream), name)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name} cannot be read as an Arrow stream: {error}") from None


def _top_level(columns: Iterable[str], available: list[str]) -> list[str]:
    """The top-level columns that hold these columns, which may be dotted."""
    return sorted({column if column in available else column.partition(".")[0] for column in columns})


def _available(columns: Columns, available: list[str], name: str) -> list[str]:
    """The needed columns, and the optional ones that exist. Raises DataError if a needed column is missing."""
    for column in _top_level(columns.needed, available):
        if column not in available:
            raise DataError(f"{name} has no column {column!r}; its columns are {', '.join(map(repr, available))}")
    return [*columns.needed, *(column for column in columns.optional if column in available)]


def _rows(batches: Iterator[Any], name: str) -> Iterator[Row]:
    """Rows of Arrow record batches, numbered from 1; at most BATCH_ROWS of them are Python objects at once."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for values in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield Row(name, number, values)
