"""Owns the files of one checkpoint: the manifest, durable writes, and the comparison of files with the manifest.

Must not know where checkpoints are stored or which one is used, nor import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
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
    """A checkpoint could not be written. Earlier ones stay, and training can continue."""


class CheckpointHeader(Value):
    """The position of a checkpoint: after rollout `step`. The weights that it saved were published as policy `version`.

    `weights`: the digest of the weights in the committed record of that step, from which a start tells whether the
    checkpoint belongs to the run's history; `saved_weights`: that of the weights that it saved. They differ after the
    step was trained again with another result. "" if unknown: older releases wrote only the former. `ranks`,
    `zero_stage` and `dtype`: of the learner that wrote it, as `epoch` and `owner`; the one that reads it must have the
    same `dtype`.
    """

    step: int
    version: int
    ranks: int
    zero_stage: int
    dtype: str
    weights: str = ""
    saved_weights: str = ""
    epoch: int = 0
    owner: str = ""


ConsumedGroups: TypeAlias = dict[int, tuple[str, ...]]
"""The ids of the groups that each rollout step trained."""


class Checkpoint(CheckpointHeader):
    """checkpoint.json. `digest`: SHA-256 of the other fields.

    `consumed`: the ids of the groups trained in each step since the previous checkpoint. Together with the records of
    the earlier steps, that is all that the policy was trained on.
    """

    name: str
    consumed: ConsumedGroups
    files: dict[str, FileFacts]
    digest: str = ""

    @property
    def size(self) -> int:
        """The size of its files in bytes."""
        return sum(facts.size for facts in self.files.values())

    def belongs_to(self, weights: Mapping[int, str]) -> bool:
        """Whether it belongs to a history with these digests of the committed weights, by step.

        An unknown digest does not exclude it: older releases recorded none.
        """
        committed = weights.get(self.step)
        return not (self.weights and committed) or self.weights == committed


def write_hashed(path: Path, chunks: Iterable[memoryview], stop: threading.Event) -> FileFacts:
    """Write a file, sync it to the disk, and hash it. Raises OSError; CheckpointError once `stop` is set."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            if stop.is_set():
                raise CheckpointError("the learner is stopping")
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size=size, sha256=digest.hexdigest())


def write_manifest(folder: Path, unsigned: Checkpoint) -> Checkpoint:
    """Write the manifest beside its files, with its own digest, and sync both to the disk. Raises OSError."""
    checkpoint = unsigned.model_copy(update={"digest": _digest_of(unsigned.model_dump_json())})
    write_message(folder / MANIFEST, checkpoint)
    sync_folder(folder)
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """Read what `write_manifest` wrote. Raises ArchiveError, naming the file."""
    path = folder / MANIFEST
    checkpoint = read_message(path, Checkpoint)
    try:
        matching = checkpoint.digest == _digest_of(path.read_text())
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    if not matching or checkpoint.name != folder.name:
        raise ArchiveError(f"{path}: damaged (its content does not match its digest or its folder)")
    return checkpoint


def _digest_of(document: str) -> str:
    """The digest of the fields in the document, including those that a newer release added."""
    fields = {name: value for name, value in json.loads(document).items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, files: dict[str, FileFacts]) -> None:
    """Read all files and compare their sizes and digests. Raises ArchiveError, naming the file."""
    with ThreadPoolExecutor(CHECKING_THREADS) as threads:
        # The results are read because that raises the errors.
        list(threads.map(lambda name: _check(folder / name, files[name]), files))


def _check(path: Path, facts: FileFacts) -> None:
    try:
        intact = matches(path, facts)
    except FileNotFoundError:
        raise ArchiveError(f"{path}: missing") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    if not intact:
        raise ArchiveError(f"{path}: damaged (its content does not match {MANIFEST})")


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, so that they survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
