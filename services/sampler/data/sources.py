"""Owns the table of prompt sources: generated tasks, and files that are read row by row.

Must not hold more than a few thousand rows at a time.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path

from services.sampler.data import columnar
from services.sampler.data.layouts import LAYOUTS, Item
from services.sampler.data.opening import open_rows
from services.sampler.data.row_rewards import RowRewards
from services.sampler.data.rows import Columns, DataError, Row, json_object
from services.settings import SourceSettings
from services.storage.errors import StoreError
from services.storage.models import local_data

DRAWS_PER_QUESTION = 50  # a generated task is exhausted after this many entries per requested question

Reader = Callable[[Path, str, str | None, Columns], Iterator[Row]]
"""(path, its name in errors, split, columns) -> rows."""


def _reasoning_gym(source: SourceSettings, where: str, wanted: int | None) -> Iterator[Item]:
    import reasoning_gym  # slow to import

    if wanted is None:
        raise DataError(
            f"{where}: null is not valid: expected a number of prompts with source = 'reasoning-gym', which has no end"
        )
    size = wanted * DRAWS_PER_QUESTION
    try:
        entries = reasoning_gym.create_dataset(source.task, size=size, seed=source.seed, **source.options)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"{where}.task: {source.task!r} is not valid: "
            f"expected a task of reasoning-gym that takes options = {source.options!r} ({error})"
        ) from None
    for entry in entries:
        reference = {"task": source.task, "entry": entry}
        messages = ({"role": "user", "content": entry["question"]},)
        yield Item(messages, "reasoning-gym", reference, gold=str(entry["answer"]), metadata={})


def _jsonl(path: Path, name: str, split: str | None, columns: Columns) -> Iterator[Row]:
    try:
        with open_rows(path, name) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Row(name, number, json_object(name, number, line))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None


def _csv(path: Path, name: str, split: str | None, columns: Columns) -> Iterator[Row]:
    """Rows of a file whose first line has the names; a cell may contain line breaks, so that rows are counted."""
    try:
        with TextIOWrapper(open_rows(path, name), newline="", encoding="utf-8-sig") as file:
            for number, values in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in values or None in values.values():
                    raise DataError(f"{name} row {number}: expected as many cells as the first line has names")
                yield Row(name, number, values)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{name} cannot be read as CSV in UTF-8: {error}") from None


READERS: Mapping[str, Reader] = {"jsonl": _jsonl, "csv": _csv, "parquet": columnar.parquet, "hf": columnar.dataset}
"""The sources that read `path`, by data.source."""


def items(source: SourceSettings, where: str, wanted: int | None, rewards: RowRewards) -> Iterator[Item]:
    """The parsed rows of a source. `where` is its section in errors; `wanted` limits a generated source.

    Raises DataError for the first row that is not valid.
    """
    if source.source not in READERS:
        yield from _reasoning_gym(source, where, wanted)
        return
    layout, of_source = LAYOUTS[source.layout], rewards.of_source(source, where)
    name = f"{where}.path: {source.path!r}"
    try:
        path = local_data(str(source.path), f"{where}.path")
    except StoreError as error:
        raise DataError(str(error)) from None
    for row in READERS[source.source](path, name, source.split, layout.columns(source)):
        yield layout.read(of_source, row)
