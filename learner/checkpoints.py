"""Owns a run's checkpoints on disk: written whole, checked by digest, found again, deleted when newer ones suffice.

Must not decide when to write one. What a checkpoint holds of the policy is the trainer's; here it is files.

    checkpoints/step-000010/checkpoint.json   written last: a folder without it is no checkpoint
    checkpoints/step-000010/engine/           model, optimizer and schedule, as DeepSpeed writes them

A checkpoint of step k holds the policy after rollout step k: replay of step k + 1 begins with it. Training draws no
random numbers, so there is no generator's state to keep. DeepSpeed's files are pickles: load only what a run of yours
wrote.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Protocol

from learner.archive import ArchiveError, RunArchive, read_message, step_name, write_message
from services.contracts import Value

log = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
ENGINE = "engine"


class FileFacts(Value):
    """A file of a checkpoint: its size in bytes, and SHA-256 as hexadecimal digits."""

    size: int
    sha256: str


class Checkpoint(Value):
    """checkpoint.json: the step it stands behind, the policy version, and its files by relative path."""

    step: int
    version: int
    ranks: int
    zero_stage: int
    files: dict[str, FileFacts]


class Saveable(Protocol):
    """What writes itself into a folder and reads itself back; collective on all ranks."""

    def save(self, folder: Path, tag: str) -> None:
        """Write to `folder`/`tag`."""

    def load(self, folder: Path, tag: str) -> None:
        """Read what `save` wrote."""


class Checkpoints:
    """The checkpoints of one run. `write` is collective, everything else is one process's."""

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self._folder = archive.checkpoints

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self._folder / step_name(step)

    def _partial(self, step: int) -> Path:
        return self._folder / f".{step_name(step)}"

    def write(self, trainer: Saveable, step: int, rank: int) -> None:
        """Write the trainer's state to a partial folder. Collective; rank 0 then calls `commit`."""
        partial = self._partial(step)
        if rank == 0:
            # No other rank writes before rank 0 takes part in the collective call.
            shutil.rmtree(partial, ignore_errors=True)
        trainer.save(partial, ENGINE)

    def commit(self, step: int, version: int, ranks: int, zero_stage: int) -> Checkpoint:
        """Make what all ranks wrote a checkpoint. Reads every file once, so call it off the learning thread."""
        partial, final = self._partial(step), self.path(step)
        files = {str(path.relative_to(partial)): _facts(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        checkpoint = Checkpoint(step=step, version=version, ranks=ranks, zero_stage=zero_stage, files=files)
        write_message(partial / MANIFEST, checkpoint)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        return checkpoint

    def complete(self) -> list[Checkpoint]:
        """All checkpoints with a manifest, by step; one whose manifest cannot be read is logged and left out."""
        found = []
        for path in self._folder.glob(f"step-*/{MANIFEST}"):
            try:
                found.append(read_message(path, Checkpoint))
            except ArchiveError as error:
                log.warning("passed over: %s", error)
        return sorted(found, key=lambda one: one.step)

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare every file with the manifest. Raises ArchiveError, naming the file."""
        for name, facts in checkpoint.files.items():
            path = self.path(checkpoint.step) / name
            if not path.is_file():
                raise ArchiveError(f"{path}: missing")
            if path.stat().st_size != facts.size or _facts(path) != facts:
                raise ArchiveError(f"{path}: damaged (its content does not match {MANIFEST})")

    def load(self, trainer: Saveable, checkpoint: Checkpoint) -> None:
        """Bring the trainer to where the checkpoint stands. Collective."""
        trainer.load(self.path(checkpoint.step), ENGINE)

    def prune(self, kept: int) -> None:
        """Keep the newest `kept` checkpoints, and the batches behind the oldest of them.

        While there are fewer, the run's model is where replay can begin, and all batches stay. Also deletes what an
        interrupted `write` left, so none may be under way.
        """
        checkpoints = self.complete()
        newest = checkpoints[-kept:]
        for one in checkpoints[:-kept]:
            # Without its manifest a folder is no checkpoint, should deletion be interrupted.
            (self.path(one.step) / MANIFEST).unlink()
        keep = {self.path(one.step) for one in newest}
        for path in {*self._folder.glob("step-*"), *self._folder.glob(".step-*")} - keep:
            shutil.rmtree(path)
        if len(newest) == kept:
            self._archive.forget_batches(newest[0].step)


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(size=path.stat().st_size, sha256=digest)
