"""Owns the files of an archived batch: the batch message, and the payloads that each rank trained of it.

Must not decide where they are. Each file names the step and the learner it belongs to, inside its digest, so that a
file under another name is not taken for what that name says. Files of older releases name neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from learner.archive.files import ArchiveError, atomic_file, digest_of, parse_message, read_file
from services.contracts import Batch, Fence
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import SamplePayload

SHARE = pa.schema(
    [
        pa.field("payload", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("response_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
    ]
)
"""One row per response, as in `SamplePayload`; log-probs are natural logarithms."""

ARRAYS = ("prompt_ids", "response_ids", "behaviour_logprobs")
NUCLEI = ("nucleus_ids", "nucleus_offsets")
"""Further columns of int32 lists, in the files of a run with top-k. Both are empty for a response without nuclei."""
DIGEST, BELONGS = b"penstock.sha256", b"penstock.belongs"
"""Keys in a share's metadata: its digest, and the step, the rank and the learner to which it belongs."""


def write_batch_file(path: Path, batch: Batch, fence: Fence) -> None:
    """Write the batch message: its fields, those of the learner's fence, and the digest of all of them."""
    fields = json.loads(batch.model_dump_json()) | _written(fence)
    document = fields | {"digest": digest_of(fields)}
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(document, separators=(",", ":")))


def read_batch_file(path: Path, step: int, fence: Fence) -> Batch:
    """The batch message, if it is that of a step as the learner `fence` archived it. Raises ArchiveError."""
    content = read_file(path)
    batch, fields = parse_message(path, content, Batch), json.loads(content)
    digest = fields.pop("digest", None)
    if "owner" in fields or digest is not None:
        if digest != digest_of(fields):
            raise ArchiveError(f"{path}: damaged (its content does not match its digest)")
        found = {name: fields.get(name) for name in ("step", "epoch", "owner")}
        _check_place(path, found, {"step": step} | _written(fence))
    return batch


def write_share_file(path: Path, batch: Batch, rank: int, payloads: Mapping[str, SamplePayload], fence: Fence) -> None:
    """Write the payloads of a batch that `rank` trains, by key."""
    groups = {sample.payload: group.group for group in batch.groups for sample in group.samples}
    columns = [
        pa.array(list(payloads), pa.string()),
        pa.array([groups[key] for key in payloads], pa.string()),
        _lists([payload.prompt_ids for payload in payloads.values()], pa.int32()),
        _lists([payload.response_ids for payload in payloads.values()], pa.int32()),
        _lists([payload.behaviour_logprobs for payload in payloads.values()], pa.float32()),
    ]
    table = pa.Table.from_arrays(columns, schema=SHARE)
    if any(payload.nuclei is not None for payload in payloads.values()):
        none = Nuclei(np.zeros(0, np.int32), np.zeros(0, np.int32))
        nuclei = [payload.nuclei or none for payload in payloads.values()]
        for name, arrays in zip(
            NUCLEI, ([part.ids for part in nuclei], [part.offsets for part in nuclei]), strict=True
        ):
            table = table.append_column(name, _lists(arrays, pa.int32()))
    belongs = json.dumps({"step": batch.step, "rank": rank} | _written(fence)).encode()
    # Parquet's own checksums do not cover the page headers and some pages.
    table = table.replace_schema_metadata({BELONGS: belongs, DIGEST: _digest(table, belongs)})
    with atomic_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def read_share_file(path: Path, step: int, rank: int, fence: Fence) -> dict[str, SamplePayload]:
    """The payloads that `rank` trained of a step, by key, without text and version spans. Raises ArchiveError."""
    try:
        table = pq.ParquetFile(path).read()
        metadata = table.schema.metadata or {}
        belongs = metadata.get(BELONGS, b"")
        # Undecodable text, or a column of another name or type, raises an error that is not Arrow's.
        digest = _digest(table, belongs)
    except FileNotFoundError:
        raise ArchiveError(f"{path}: missing") from None
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError) as error:
        raise ArchiveError(f"{path}: damaged ({' '.join(str(error).split())})") from None
    if digest != metadata.get(DIGEST):
        raise ArchiveError(f"{path}: damaged (its content does not match its digest)")
    if belongs:
        _check_place(path, json.loads(belongs), {"step": step, "rank": rank} | _written(fence))
    prompts, responses, logprobs = (_arrays(table, name) for name in ARRAYS)
    keys = table.column("payload").to_pylist()
    nuclei: list[Nuclei | None] = [None] * len(keys)
    if NUCLEI[0] in table.column_names:
        found = zip(*(_arrays(table, name) for name in NUCLEI), strict=True)
        nuclei = [Nuclei(ids, offsets) if len(offsets) else None for ids, offsets in found]
    rows = zip(keys, prompts, responses, logprobs, nuclei, strict=True)
    return {key: SamplePayload(prompt, ids, values, "", "", (), part) for key, prompt, ids, values, part in rows}


def _written(fence: Fence) -> dict[str, Any]:
    return {"epoch": fence.epoch, "owner": fence.owner}


def _check_place(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if found != wanted:
        raise ArchiveError(f"{path}: is not the file that its name says: it belongs to {found}, expected {wanted}")


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """Arrays of any lengths as one Arrow column, without a Python object per token."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, kind), type=pa.list_(pa.field("item", kind, nullable=False))
    )


def _digest(table: pa.Table, belongs: bytes) -> bytes:
    """The digest of `belongs` and the rows, independent of their layout in Parquet."""
    digest = hashlib.sha256(belongs)
    digest.update(repr((table.column("payload").to_pylist(), table.column("group").to_pylist())).encode())
    for name in ARRAYS + tuple(name for name in NUCLEI if name in table.column_names):
        arrays = _arrays(table, name)
        digest.update(np.array([len(array) for array in arrays], np.int64).tobytes())
        for array in arrays:
            digest.update(array.tobytes())
    return digest.hexdigest().encode()


def _arrays(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """The inverse of `_lists`."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]
