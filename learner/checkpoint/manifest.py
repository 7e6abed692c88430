"""Owns the files of one checkpoint: what each says, how they are written to the disk itself, and how they are checked.

Must not know where checkpoints lie or which of them is used, nor import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from learner.archive import ArchiveError, read_message, write_message
from services.contracts import Value
from services.storage.facts import FileFacts, matches

MANIFEST = "checkpoint.json"
SAMPLER = "sampler.json"
STATE_SUFFIX = ".safetensors"
CHECKING_THREADS = 4


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The earlier ones stay, and training may go on."""


class Cut(Value):
    """Where a checkpoint stands: behind rollout `step`, whose weights were published as policy `version`.

    `weights`: the digest of those weights, "" where nobody computed it. `ranks`, `zero_stage` and `dtype` of the
    learner that wrote it; only `dtype` binds the one that reads it.
    """

    step: int
    version: int
    ranks: int
    zero_stage: int
    dtype: str
    weights: str = ""


Consumed: TypeAlias = dict[int, tuple[str, ...]]
"""The ids of the groups that each rollout step trained."""


class Checkpoint(Cut):
    """checkpoint.json. `consumed`: the ids of the groups trained in each step since the checkpoint before it, which
    with the records of the steps before is all that the policy has seen. `digest`: SHA-256 of the other fields.
    """

    name: str
    consumed: Consumed
    files: dict[str, FileFacts]
    digest: str = ""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(facts.size for facts in self.files.values())


def write_hashed(path: Path, chunks: Iterable[memoryview], stop: threading.Event) -> FileFacts:
    """Write a file to the disk itself, and hash it on the way. Raises OSError; CheckpointError once `stop` is set."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            if stop.is_set():
                raise CheckpointError("the learner stops")
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size=size, sha256=digest.hexdigest())


def write_manifest(folder: Path, unsealed: Checkpoint) -> Checkpoint:
    """Put the manifest beside its files, with its own digest, all of it on the disk itself. Raises OSError."""
    checkpoint = unsealed.model_copy(update={"digest": _seal(unsealed.model_dump_json())})
    write_message(folder / MANIFEST, checkpoint)
    sync_folder(folder)
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """The reverse of `write_manifest`. Raises ArchiveError, naming the file."""
    path = folder / MANIFEST
    checkpoint = read_message(path, Checkpoint)
    try:
        sealed = checkpoint.digest == _seal(path.read_text())
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    if not sealed or checkpoint.name != folder.name:
        raise ArchiveError(f"{path}: damaged (its content does not match its digest or its folder)")
    return checkpoint


def _seal(document: str) -> str:
    """Of the fields as they stand there, so that a newer writer's additions count."""
    fields = {name: value for name, value in json.loads(document).items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, files: dict[str, FileFacts]) -> None:
    """Read all of them and compare. Raises ArchiveError, naming the file."""
    with ThreadPoolExecutor(CHECKING_THREADS) as threads:
        # Consumed for what it raises.
        list(threads.map(lambda name: _check(folder / name, files[name]), files))


def _check(path: Path, facts: FileFacts) -> None:
    try:
        whole = matches(path, facts)
    except FileNotFoundError:
        raise ArchiveError(f"{path}: missing") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    if not whole:
        raise ArchiveError(f"{path}: damaged (its content does not match {MANIFEST})")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
