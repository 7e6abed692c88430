"""Owns a run's folder on disk: what was run, each rollout step's batch with its payloads, and what the step gave.

Must not import torch, Redis or an engine: it is read without a gateway, also long after the run.
Where a store makes it durable (its mirror), a file counts once it is there, and the folder is this node's scratch.

    run.json                             the recipe, the model's folder, the number of ranks
    batches/step-000012.json             the batch message, written by rank 0 before training
    batches/step-000012.rank-0.parquet   the payloads of rank 0's share; every rank writes its own, before training
    records/step-000012.json             the step record, after its commit
    failures/step-000012.json            the step record of a step that failed the run, and so was never committed

Every file is written whole or not at all. The ranks of a run on several machines need one shared folder, or a store.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from services.contracts import Batch, StepRecord, Value
from services.settings import Recipe
from services.storage.mirror import NO_MIRROR, Mirror
from services.storage.places import runs_folder
from services.streams.delivery.payloads import SamplePayload

FACTS, BATCHES, RECORDS, FAILURES, CHECKPOINTS = "run.json", "batches", "records", "failures", "checkpoints"
FIRST_STEP = 1
"""The sampler counts rollout steps from 1; the run's model stands at step 0."""
STEP_FILE = re.compile(r"step-(\d{6,})\.json")
STEP = re.compile(r"step-(\d{6,})\.")
SHARE = pa.schema([
    pa.field("payload", pa.string(), nullable=False),
    pa.field("group", pa.string(), nullable=False),
    pa.field("prompt_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("response_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("behaviour_logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
])  # fmt: skip
"""One response a row, as `SamplePayload` has it; log-probs are natural logarithms."""

ARRAYS = ("prompt_ids", "response_ids", "behaviour_logprobs")
DIGEST = b"penstock.sha256"
"""Key of the share's digest in the file's metadata."""

V = TypeVar("V", bound=Value)


class ArchiveError(RuntimeError):
    """Something of a run's folder is missing or damaged; the text names it."""


class RunFacts(Value):
    """run.json: what replay needs to know of a run besides its batches. `versions`: of the libraries that trained."""

    run: str
    recipe: Recipe
    model_path: str
    ranks: int
    device: str
    versions: dict[str, str]


def run_folder(run: str) -> Path:
    """Where the run's files go: below PENSTOCK_RUNS, by default ./runs."""
    return runs_folder() / run


def step_name(step: int) -> str:
    """How a rollout step is called in file names; they sort as the steps do."""
    return f"step-{step:06d}"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` when the body is done, and vanishes when it raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_message(path: Path, message: Value) -> None:
    """Write a pydantic value as JSON, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(message.model_dump_json())


def read_message(path: Path, model: type[V]) -> V:
    """The reverse of `write_message`. Raises ArchiveError, naming the file."""
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ArchiveError(f"{path}: missing") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArchiveError(f"{path}: damaged ({where}: {first['msg']})".replace("(: ", "(")) from None


class RunArchive:
    """The archive in a run's folder. Writing is blocking, and done once it is durable; nothing is cached.

    What writes, fetches or deletes raises StoreError too.
    """

    def __init__(self, folder: Path, mirror: Mirror = NO_MIRROR) -> None:
        self.folder = folder
        self.mirror = mirror
        self.checkpoints = folder / CHECKPOINTS
        self._batches = folder / BATCHES
        self._records = folder / RECORDS
        self._failures = folder / FAILURES

    def forget_scratch(self) -> None:
        """Delete what an earlier process left on this node, where the store holds the run; not its checkpoints.

        By every rank, before it meets the others: what was rewound meanwhile must not be read again.
        """
        if self.mirror.remote and FACTS in self.mirror.listed():
            for part in (self._batches, self._records, self._failures):
                shutil.rmtree(part, ignore_errors=True)

    def take_in(self) -> None:
        """Bring here what the store holds of the run, but for shares and checkpoints, which are fetched when needed.

        A run that began without a store is put there as it is. By rank 0.
        """
        if not self.mirror.remote:
            return
        stored = self.mirror.listed()
        if FACTS not in stored and (self.folder / FACTS).is_file():
            # In order of name: a batch's shares after its message, a checkpoint's manifest before its files; so that
            # only at the end, with run.json, all of it counts.
            for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                if _counts(path.relative_to(self.folder)):
                    self._keep(path)
            return
        small = {n: size for n, size in stored.items() if n == FACTS or (_part(n) and n.endswith(".json"))}
        self.mirror.fetch(small, self.folder)

    def _keep(self, path: Path) -> None:
        self.mirror.put(str(path.relative_to(self.folder)), path)

    def begin(self, facts: RunFacts, *, resumed: bool = False) -> None:
        """Start a run's archive, or go on with it if `resumed`. Raises ArchiveError if another run left records."""
        earlier = [path for part in (self._records, self.checkpoints) for path in part.glob("step-*")]
        if earlier and not resumed:
            where = self.mirror.location("", self.folder)
            raise ArchiveError(
                f"{where}: holds {len(earlier)} records and checkpoints of an earlier run of this id; "
                "move the folder away, or submit the run under another id"
            )
        self.prepare()
        self._write(self.folder / FACTS, facts)

    def prepare(self) -> None:
        """Create the folders; every rank does so before it writes."""
        for part in (self._batches, self._records, self._failures, self.checkpoints):
            part.mkdir(parents=True, exist_ok=True)

    def facts(self) -> RunFacts:
        """What was run. Raises ArchiveError."""
        return read_message(self.folder / FACTS, RunFacts)

    def _write(self, path: Path, message: Value) -> None:
        write_message(path, message)
        self._keep(path)

    def write_batch(self, batch: Batch) -> None:
        """Keep the batch message, by rank 0, before it is trained."""
        self._write(self.batch_path(batch.step), batch)

    def write_share(self, batch: Batch, rank: int, payloads: Mapping[str, SamplePayload]) -> None:
        """Keep the payloads that `rank` trains of a batch, by key, before they are trained."""
        groups = {sample.payload: group.group for group in batch.groups for sample in group.samples}
        columns = [
            pa.array(list(payloads), pa.string()),
            pa.array([groups[key] for key in payloads], pa.string()),
            _lists([one.prompt_ids for one in payloads.values()], pa.int32()),
            _lists([one.response_ids for one in payloads.values()], pa.int32()),
            _lists([one.behaviour_logprobs for one in payloads.values()], pa.float32()),
        ]
        table = pa.Table.from_arrays(columns, schema=SHARE)
        # Parquet's own checksums leave out some pages and the page headers.
        table = table.replace_schema_metadata({DIGEST: _digest(table)})
        with whole_file(self.share_path(batch.step, rank)) as partial:
            pq.write_table(table, partial, compression="zstd")
        self._keep(self.share_path(batch.step, rank))

    def write_record(self, record: StepRecord) -> None:
        """Keep a committed step's record."""
        self._write(self._records / f"{step_name(record.step)}.json", record)

    def write_failure(self, record: StepRecord) -> None:
        """Keep the record of a step that failed the run; its `version` is the one that the step started from."""
        self._write(self._failures / f"{step_name(record.step)}.json", record)

    def batch_path(self, step: int) -> Path:
        """The file of a step's batch message."""
        return self._batches / f"{step_name(step)}.json"

    def share_path(self, step: int, rank: int) -> Path:
        """The file of one rank's payloads of a step."""
        return self._batches / f"{step_name(step)}.rank-{rank}.parquet"

    def fetch_shares(self, step: int) -> None:
        """Bring all ranks' payloads of a step to this node, as far as the store has them."""
        shares = {n: size for n, size in self.mirror.listed(BATCHES).items() if _step(n) == step}
        self.mirror.fetch(shares, self.folder)

    def steps(self) -> list[int]:
        """The rollout steps whose batch is archived, ascending."""
        found = (STEP_FILE.fullmatch(path.name) for path in self._batches.glob("step-*.json"))
        return sorted(int(match[1]) for match in found if match)

    def batch(self, step: int) -> Batch:
        """A step's batch message. Raises ArchiveError."""
        return read_message(self.batch_path(step), Batch)

    def share(self, step: int, rank: int) -> dict[str, SamplePayload]:
        """The payloads that `rank` trained, by key; without text and version spans. Raises ArchiveError."""
        path = self.share_path(step, rank)
        try:
            table = pq.ParquetFile(path).read()
            # Beyond Arrow's own exceptions, undecodable text and a column of another name or type.
            digest = _digest(table)
        except FileNotFoundError:
            raise ArchiveError(f"{path}: missing") from None
        except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError) as error:
            raise ArchiveError(f"{path}: damaged ({' '.join(str(error).split())})") from None
        if digest != (table.schema.metadata or {}).get(DIGEST):
            raise ArchiveError(f"{path}: damaged (its content does not match its digest)")
        prompts, responses, logprobs = (_arrays(table, name) for name in ARRAYS)
        keys = table.column("payload").to_pylist()
        rows = zip(keys, prompts, responses, logprobs, strict=True)
        return {key: SamplePayload(prompt, ids, values, "", "", ()) for key, prompt, ids, values in rows}

    def record(self, step: int) -> StepRecord | None:
        """What a step gave: committed, or as it failed the run; None when it came to neither. Raises ArchiveError."""
        for part in (self._records, self._failures):
            path = part / f"{step_name(step)}.json"
            if path.exists():
                return read_message(path, StepRecord)
        return None

    def forget_after(self, step: int) -> None:
        """Delete the batches and records of the steps behind `step`, which have left the run's history."""
        for part in (BATCHES, RECORDS, FAILURES):
            self._forget(part, lambda one: one > step)

    def forget_batches(self, up_to: int) -> None:
        """Delete the batches of the steps at or below `up_to`; their records stay."""
        self._forget(BATCHES, lambda step: step <= up_to)

    def forget_batch(self, step: int) -> None:
        """Delete the batch of a step, as far as it is there."""
        self._forget(BATCHES, lambda one: one == step)

    def _forget(self, part: str, gone: Callable[[int], bool]) -> None:
        """Delete the files of some steps, a batch's message before its shares: without it the step does not count."""
        stored = [name for name in self.mirror.listed(part) if gone(_step(name))]
        for messages in (True, False):
            self.mirror.delete([name for name in stored if name.endswith(".json") is messages])
        for path in sorted((self.folder / part).glob("step-*")):
            if gone(_step(path.name)):
                path.unlink()


def _part(name: str) -> bool:
    return name.partition("/")[0] in (BATCHES, RECORDS, FAILURES)


def _counts(path: Path) -> bool:
    """Not one that is being written, nor an export."""
    return not any(part.startswith(".") for part in path.parts) and "export" not in path.parts


def _step(name: str) -> int:
    """The step of a file's name; 0 for another's."""
    found = STEP.search(name)
    return int(found[1]) if found else 0


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """Arrays of any lengths as one Arrow column, without a Python object per token."""
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, kind), type=pa.list_(pa.field("item", kind, nullable=False))
    )


def _digest(table: pa.Table) -> bytes:
    """Of what the rows say, not of how Parquet lays them out."""
    digest = hashlib.sha256(repr((table.column("payload").to_pylist(), table.column("group").to_pylist())).encode())
    for name in ARRAYS:
        arrays = _arrays(table, name)
        digest.update(np.array([len(one) for one in arrays], np.int64).tobytes())
        for one in arrays:
            digest.update(one.tobytes())
    return digest.hexdigest().encode()


def _arrays(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """The reverse of `_lists`."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]
