"""Owns the columns of the archive's Parquet files: rows to an Arrow table, and back.

Must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from services.contracts import Prompt
from services.storage.groups.story import ArchivedGroup, GroupRow, GroupStory

SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
SAMPLE = pa.struct(
    [
        ("index", pa.int32()),
        ("outcome", pa.string()),
        ("score", pa.float64()),
        ("reason", pa.string()),
        ("answer", pa.string()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("masked", pa.bool_()),
        ("staleness", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("mean_logprob", pa.float64()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("replica", pa.string()),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("spans", pa.list_(SPAN)),
    ]
)
"""One sample; see ArchivedSample."""
FACTS = [
    ("group", pa.string()),
    ("lane", pa.string()),
    ("resumption", pa.int32()),
    ("release", pa.string()),
    ("reason", pa.string()),
    ("evaluation", pa.string()),
    ("set", pa.string()),
    ("step", pa.int64()),
    ("optimizer_step", pa.int32()),
    ("version", pa.int64()),
    ("staleness", pa.int32()),
    ("archived_ms", pa.int64()),
    ("prompt_id", pa.string()),
    ("prompt", pa.string()),
]
"""Of a group; see ArchivedGroup. `prompt`: the whole of it, as JSON."""
TOKENS = [
    ("prompt_ids", pa.list_(pa.int32())),
    ("response_ids", pa.list_(pa.list_(pa.int32()))),
    ("behaviour_logprobs", pa.list_(pa.list_(pa.float32()))),
]
SCHEMA = pa.schema([*FACTS, ("samples", pa.list_(SAMPLE)), *TOKENS])
"""One row per attempt at a group."""
UNTIL_TOKENS = [name for name, _ in FACTS] + ["samples"]
"""The columns that a search reads."""
ORDERED = ["group", "lane", "resumption", "step", "version", "archived_ms", "prompt_id"]
"""The columns with statistics, by which readers skip rows."""


def to_table(rows: Sequence[GroupRow]) -> pa.Table:
    """The rows in their order."""
    documents = [row.group.model_dump(exclude={"prompt"}) for row in rows]
    for document, row in zip(documents, rows, strict=True):
        prompt = row.group.prompt
        document["prompt_id"] = prompt.id if prompt else None
        document["prompt"] = prompt.model_dump_json() if prompt else None
        for sample in document["samples"]:
            sample["rewards"] = list(sample["rewards"].items())
    kinds = {name: SCHEMA.field(name).type for name in UNTIL_TOKENS}
    columns = [pa.array([document[name] for document in documents], kind) for name, kind in kinds.items()]
    tokens = [row.tokens for row in rows]
    columns.append(_lists([each.prompt_ids for each in tokens], pa.int32()))
    columns.append(_nested([each.response_ids for each in tokens], pa.int32()))
    columns.append(_nested([each.behaviour_logprobs for each in tokens], pa.float32()))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of tables in all columns: an older release wrote fewer of them, and null is what its rows have there."""
    absent = [name for name in SCHEMA.names if not any(name in table.column_names for table in tables)]
    table = pa.concat_tables(tables, promote_options="default")
    for name in absent:
        table = table.append_column(SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
    return table.select(SCHEMA.names)


def to_groups(table: pa.Table) -> list[ArchivedGroup]:
    """The groups of a table that has the columns UNTIL_TOKENS."""
    return [ArchivedGroup.model_validate(_document(row)) for row in table.select(UNTIL_TOKENS).to_pylist()]


def to_story(table: pa.Table, attempts: Sequence[int]) -> GroupStory:
    """The story in a table of one row and all columns. `attempts`: those at this group."""
    return GroupStory.model_validate(_document(table.to_pylist()[0]) | {"attempts": tuple(attempts)})


def _document(row: dict[str, Any]) -> dict[str, Any]:
    text = row["prompt"]
    samples = [{**sample, "rewards": dict(sample["rewards"] or ())} for sample in row["samples"]]
    return {**row, "prompt": Prompt.model_validate_json(text) if text else None, "samples": samples}


def _offsets(sizes: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int32))


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """Arrays of any lengths as one Arrow column, without a Python object per token."""
    values = np.concatenate(arrays) if len(arrays) else np.zeros(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), pa.array(values, kind))


def _nested(rows: Sequence[Sequence[NDArray[Any]]], kind: pa.DataType) -> pa.ListArray:
    inner = _lists([array for row in rows for array in row], kind)
    return pa.ListArray.from_arrays(_offsets([len(row) for row in rows]), inner)
