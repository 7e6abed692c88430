"""Owns a run's folder on disk: run.json, the batch and payloads of each rollout step, and the record of each step.

Must not import torch, Redis or an engine: it is read without a gateway, even long after the run.
With a store (the mirror), a file counts once the store holds it, and the folder is the scratch space of this node.

    run.json                             the recipe, the model's folder, the number of ranks
    batches/step-000012.e0002-OWNER.json             the batch message, written by rank 0 before training
    batches/step-000012.e0002-OWNER.rank-0.parquet   the payloads of rank 0's share; every rank writes its own before
    batches/differs-...                              set aside: it names other groups than the step's committed record
    records/step-000012.json                         the step record, written after its commit
    failures/step-000012.json                        the record of a step that failed the run, never committed

Every file is written completely or not at all. Ranks on several machines need one shared folder, or a store.

A learner that was replaced may still write. So the files of a batch have the name of the learner that wrote them, its
epoch and its id, and the step's record names the learner whose files count. Files of older releases have no such name.
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

from services.contracts import UNOWNED, Batch, Fence, StepRecord, Value
from services.settings import Recipe
from services.storage.mirror import NO_MIRROR, Mirror
from services.storage.places import runs_folder
from services.streams.delivery.payloads import SamplePayload

FACTS, BATCHES, RECORDS, FAILURES, CHECKPOINTS = "run.json", "batches", "records", "failures", "checkpoints"
FIRST_STEP = 1
"""The sampler counts rollout steps from 1; the run's model is step 0."""
DIFFERS = "differs-"
ARCHIVED = re.compile(r"step-(?P<step>\d{6,})(?:\.e(?P<epoch>\d{4,})-(?P<owner>[\w-]*))?\.")
"""The start of the name of each file that belongs to a step."""
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
DIGEST = b"penstock.sha256"
"""Key of the share's digest in the file's metadata."""

V = TypeVar("V", bound=Value)


class ArchiveError(RuntimeError):
    """A file of a run's folder is missing or damaged. The text names it."""


class RunOrigin(Value):
    """The part of run.json that says which run it is of, as ids are used again. None: of an earlier release."""

    created_at: float | None = None


class RunFacts(RunOrigin):
    """run.json: what a replay needs besides the batches. `versions`: of the libraries used in training."""

    run: str
    recipe: Recipe
    model_path: str
    ranks: int
    device: str
    versions: dict[str, str]


def run_folder(run: str) -> Path:
    """The folder for the run's files, below PENSTOCK_RUNS, by default ./runs."""
    return runs_folder() / run


def step_name(step: int) -> str:
    """The name of a rollout step in file names, which sort in the order of the steps."""
    return f"step-{step:06d}"


def batch_name(step: int, fence: Fence) -> str:
    """The name, in file names, of the batch that a learner archived for a step."""
    return step_name(step) + (f".e{fence.epoch:04d}-{fence.owner}" if fence != UNOWNED else "")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to `path` after the body, and deleted if the body raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_message(path: Path, message: Value) -> None:
    """Write a pydantic value as JSON, completely or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(message.model_dump_json())


def read_message(path: Path, model: type[V]) -> V:
    """Read what `write_message` wrote. Raises ArchiveError, naming the file."""
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
    """The archive in a run's folder. Writes block until the file is durable; nothing is cached.

    Methods that write, fetch or delete also raise StoreError.
    """

    def __init__(self, folder: Path, mirror: Mirror = NO_MIRROR) -> None:
        self.folder = folder
        self.mirror = mirror
        self.checkpoints = folder / CHECKPOINTS
        self._batches = folder / BATCHES
        self._records = folder / RECORDS
        self._failures = folder / FAILURES

    def clear_scratch(self) -> None:
        """Delete the batches and records that an earlier process left on this node, if the store holds the run.

        Every rank calls it before it joins the others, so that none reads a step that was rewound meanwhile.
        """
        if self.mirror.remote and FACTS in self.mirror.listed():
            for part in (self._batches, self._records, self._failures):
                shutil.rmtree(part, ignore_errors=True)

    def sync_with_store(self, created_at: float | None = None) -> None:
        """Fetch run.json, batch messages and records from the store; shares and checkpoints are fetched when needed.

        If the store does not hold the run yet, because it started without a store, upload its folder. Rank 0 only.
        Raises ArchiveError if the folder is of a run that was not created at `created_at`.
        """
        if not self.mirror.remote:
            return
        stored = self.mirror.listed()
        if FACTS not in stored and (self.folder / FACTS).is_file():
            if read_message(self.folder / FACTS, RunOrigin).created_at not in (None, created_at):
                raise ArchiveError(
                    f"{self.folder}: holds files of an earlier run with this id, which the store no longer has; "
                    "move the folder away, or submit the run under another id"
                )
            # Sorted by name, run.json comes last. Only then does the store hold the run, so an interrupted upload is
            # repeated.
            for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                if _is_durable(path.relative_to(self.folder)):
                    self._keep(path)
            return
        small = {
            name: size
            for name, size in stored.items()
            if name == FACTS or (_is_archived(name) and name.endswith(".json"))
        }
        self.mirror.fetch(small, self.folder)

    def _keep(self, path: Path) -> None:
        self.mirror.put(str(path.relative_to(self.folder)), path)

    def start(self, facts: RunFacts, *, resumed: bool = False) -> None:
        """Start a run's archive, or continue it if `resumed`. Raises ArchiveError if it has records otherwise."""
        earlier = [path for part in (self._records, self.checkpoints) for path in part.glob("step-*")]
        if earlier and not resumed:
            where = self.mirror.location("", self.folder)
            raise ArchiveError(
                f"{where}: holds {len(earlier)} records and checkpoints, but Redis has no committed policy of the run. "
                "If they are of an earlier run with this id: move the folder away, or submit the run under another id. "
                "If they are of this run, Redis lost its state: restore the data of Redis and resume the run, or, "
                "without that data, submit it under another id"
            )
        self.prepare()
        self._write(self.folder / FACTS, facts)

    def prepare(self) -> None:
        """Create the folders. Every rank does so before it writes."""
        for part in (self._batches, self._records, self._failures, self.checkpoints):
            part.mkdir(parents=True, exist_ok=True)

    def facts(self) -> RunFacts:
        """The content of run.json. Raises ArchiveError."""
        return read_message(self.folder / FACTS, RunFacts)

    def _write(self, path: Path, message: Value) -> None:
        write_message(path, message)
        self._keep(path)

    def write_batch(self, batch: Batch, fence: Fence) -> None:
        """Write the batch message, before it is trained. Rank 0 only; `fence`: its own, as in all that it writes."""
        self._write(self.batch_path(batch.step, fence), batch)

    def write_share(self, batch: Batch, rank: int, payloads: Mapping[str, SamplePayload], fence: Fence) -> None:
        """Write the payloads of a batch that `rank` trains, by key, before they are trained."""
        groups = {sample.payload: group.group for group in batch.groups for sample in group.samples}
        columns = [
            pa.array(list(payloads), pa.string()),
            pa.array([groups[key] for key in payloads], pa.string()),
            _lists([payload.prompt_ids for payload in payloads.values()], pa.int32()),
            _lists([payload.response_ids for payload in payloads.values()], pa.int32()),
            _lists([payload.behaviour_logprobs for payload in payloads.values()], pa.float32()),
        ]
        table = pa.Table.from_arrays(columns, schema=SHARE)
        # Parquet's own checksums do not cover the page headers and some pages.
        table = table.replace_schema_metadata({DIGEST: _digest(table)})
        path = self.share_path(batch.step, rank, fence)
        with atomic_file(path) as partial:
            pq.write_table(table, partial, compression="zstd")
        self._keep(path)

    def write_record(self, record: StepRecord) -> None:
        """Write the record of a committed step."""
        self._write(self._records / f"{step_name(record.step)}.json", record)

    def write_failure(self, record: StepRecord) -> None:
        """Write the record of a step that failed the run. Its `version` is the one from which the step started."""
        self._write(self._failures / f"{step_name(record.step)}.json", record)

    def batch_path(self, step: int, fence: Fence) -> Path:
        """The path of the batch message of a step that a learner archived."""
        return self._batches / f"{batch_name(step, fence)}.json"

    def share_path(self, step: int, rank: int, fence: Fence) -> Path:
        """The path of one rank's payloads of a step."""
        return self._batches / f"{batch_name(step, fence)}.rank-{rank}.parquet"

    def fetch_shares(self, step: int, fence: Fence) -> None:
        """Fetch the payloads of all ranks that the store holds for a step to this node."""
        start = f"{BATCHES}/{batch_name(step, fence)}.rank-"
        shares = {name: size for name, size in self.mirror.listed(BATCHES).items() if name.startswith(start)}
        self.mirror.fetch(shares, self.folder)

    def batches(self) -> list[tuple[int, Fence]]:
        """The step of each archived batch message, and the learner that wrote it; the newest learner last."""
        found = (_written(path.name) for path in self._batches.glob("step-*.json"))
        return sorted(filter(None, found), key=lambda written: (written[0], written[1].epoch, written[1].owner))

    def trained(self) -> dict[int, Fence]:
        """By rollout step whose batch is archived, ascending: the learner whose files of it count.

        That is the one which the step's record names; the newest one for a step without a record. Raises ArchiveError.
        """
        found: dict[int, Fence] = {}
        batches = self.batches()
        for step, fence in batches:
            record = self.record(step)
            if record is None or record.fence == fence:
                found[step] = fence
        return found

    def batch(self, step: int, fence: Fence) -> Batch:
        """The batch message that a learner archived for a step. Raises ArchiveError."""
        return read_message(self.batch_path(step, fence), Batch)

    def share(self, step: int, rank: int, fence: Fence) -> dict[str, SamplePayload]:
        """The payloads that `rank` trained, by key, without text and version spans. Raises ArchiveError."""
        path = self.share_path(step, rank, fence)
        try:
            table = pq.ParquetFile(path).read()
            # Undecodable text, or a column of another name or type, raises an error that is not Arrow's.
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
        """The record of a step, committed or failed; None if neither was written. Raises ArchiveError."""
        for part in (self._records, self._failures):
            path = part / f"{step_name(step)}.json"
            if path.exists():
                return read_message(path, StepRecord)
        return None

    def set_aside(self, step: int, fence: Fence) -> str:
        """Rename a batch message, which then no longer counts; returns its new place. Its shares keep their names."""
        path = self.batch_path(step, fence)
        aside = f"{BATCHES}/{DIFFERS}{path.name}"
        self.mirror.put(aside, path)
        self.mirror.delete([f"{BATCHES}/{path.name}"])
        path.rename(self.folder / aside)
        return self.mirror.location(aside, self.folder)

    def delete_after(self, step: int, epoch: int) -> None:
        """Delete the batches and records of the steps after `step`, which are no longer in the run's history.

        Not the batches of learners with an epoch above `epoch`, that of the caller.
        """
        for part in (BATCHES, RECORDS, FAILURES):
            self._delete(part, lambda archived, by: archived > step and by.epoch <= epoch)

    def delete_batches(self, up_to: int, epoch: int) -> None:
        """Delete the batches of the steps up to `up_to`, inclusive, except newer learners' own. Their records stay."""
        self._delete(BATCHES, lambda archived, by: archived <= up_to and by.epoch <= epoch)

    def _delete(self, part: str, selected: Callable[[int, Fence], bool]) -> None:
        """Delete the selected files; a batch's message before its shares, as a step needs its message."""

        def obsolete(name: str) -> bool:
            written = _written(name.rpartition("/")[2].removeprefix(DIFFERS))
            return written is not None and selected(*written)

        stored = [name for name in self.mirror.listed(part) if obsolete(name)]
        for messages in (True, False):
            self.mirror.delete([name for name in stored if name.endswith(".json") is messages])
        for path in sorted((self.folder / part).iterdir()):
            if obsolete(path.name):
                path.unlink()


def _is_archived(name: str) -> bool:
    return name.partition("/")[0] in (BATCHES, RECORDS, FAILURES)


def _is_durable(path: Path) -> bool:
    """Whether a file belongs in the store. Files being written and exports do not."""
    return not any(part.startswith(".") for part in path.parts) and "export" not in path.parts


def _written(name: str) -> tuple[int, Fence] | None:
    """The step in a file's name, and the learner that wrote it if it is a batch's; None if it belongs to no step."""
    found = ARCHIVED.match(name)
    if found is None:
        return None
    return int(found["step"]), Fence(int(found["epoch"]), found["owner"]) if found["epoch"] else UNOWNED


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    """Arrays of any lengths as one Arrow column, without a Python object per token."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, kind), type=pa.list_(pa.field("item", kind, nullable=False))
    )


def _digest(table: pa.Table) -> bytes:
    """The digest of the rows, independent of their layout in Parquet."""
    digest = hashlib.sha256(repr((table.column("payload").to_pylist(), table.column("group").to_pylist())).encode())
    for name in ARRAYS:
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
