"""Owns a run's checkpoints on disk: write, find, check, load and delete them.

Must not decide when to write one, nor import torch. The trainer defines what a rank's file holds.
With a store, a checkpoint exists once the store holds its manifest, under the same names. The folder is then scratch
space: it holds the manifests of checkpoints that other nodes wrote, and their files once they have been fetched.

    checkpoints/.step-000010.e0002-OWNER.3f9a2c1b/      being written; one rename makes it the next entry
    checkpoints/step-000010.e0002-OWNER.3f9a2c1b/
        rank-0000.safetensors                written by that rank, see learner/training/state.py
        rank-0000.json                       until all ranks have written: the rank's report of success or failure
        sampler.json                         the sampler's snapshot, for rewinding; not read here
        checkpoint.json                      the manifest, written last, with every file's digest; required
    checkpoints/damaged-step-000010.e0002-...    set aside: it was damaged when the learner needed it
    checkpoints/differs-step-000010.e0002-...    set aside: its weights are not those of the committed step

In a store, a checkpoint that is set aside keeps its name, and its manifest is renamed to damaged-checkpoint.json or
differs-checkpoint.json.

A checkpoint of step k holds the policy after rollout step k, so training or replay of step k + 1 starts from it. A name
is never reused, so a checkpoint is not deleted before another one of its step is complete. It has the epoch and the id
of the learner that wrote it, which decide who may delete it (Fence.may_delete). In names of older releases,
step-000010-3f9a2c1b, they are missing.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from learner.archive import DIFFERS, ArchiveError, RunArchive, writer_of, written_by
from learner.checkpoint.manifest import (
    MANIFEST,
    SAMPLER,
    STATE_SUFFIX,
    Checkpoint,
    CheckpointError,
    CheckpointHeader,
    ConsumedGroups,
    check_files,
    read_manifest,
    sync_folder,
    write_hashed,
    write_manifest,
)
from learner.checkpoint.partial import PartialCheckpoints, checkpoint_error, delete_folder
from learner.checkpoint.remote import DAMAGED, StoredCheckpoints
from learner.checkpoint.reports import collect_files, retry_during_outage
from services.contracts import UNOWNED, Fence

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 1800.0
"""Seconds that rank 0 waits for all ranks' files."""


class Restorable(Protocol):
    """An object that loads its state from files; collective on all ranks."""

    def restore(self, files: Sequence[Path]) -> None:
        """Load the state from the files of all ranks."""


class Checkpoints:
    """The checkpoints of one run. Methods block. Ranks above 0 only write and load.

    One checkpoint is written at a time: `partial.start` by rank 0, `partial.write` by every rank, `commit` by rank 0.
    None of these is collective. With a store, call `stored.fetch_manifests` first, and `stored.fetch` before `load`.
    Methods that use the store raise StoreError.
    """

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self._folder = archive.checkpoints
        self.stored = StoredCheckpoints(archive)
        self.partial = PartialCheckpoints(archive, self.stored)

    def path(self, checkpoint: Checkpoint) -> Path:
        """The folder of a checkpoint."""
        return self._folder / checkpoint.name

    def commit(
        self,
        name: str,
        header: CheckpointHeader,
        stop: threading.Event,
        *,
        sampler: str | None = None,
        consumed: ConsumedGroups | None = None,
        deadline_s: float = WRITE_TIMEOUT_S,
    ) -> Checkpoint:
        """Wait until all ranks have written their files, and complete the checkpoint. Does not read the files.

        `sampler`: the content of sampler.json. `consumed`: the groups of the steps since the previous checkpoint.
        Tolerates a store that is unavailable for a short time. Raises CheckpointError, after deleting what was written.
        """
        partial = self.partial.path(name)
        try:
            files = collect_files(self.partial.reports(name), header.ranks, stop, deadline_s)
            if sampler is not None:
                files[SAMPLER] = write_hashed(partial / SAMPLER, [memoryview(sampler.encode())], stop)
                retry_during_outage(lambda: self.stored.put(name, partial / SAMPLER), stop)
            unsigned = Checkpoint(**header.model_dump(), name=name, consumed=consumed or {}, files=files)
            checkpoint = write_manifest(partial, unsigned)
            retry_during_outage(lambda: self.stored.put(name, partial / MANIFEST), stop)
            partial.rename(self._folder / name)
            sync_folder(self._folder)
        except (OSError, ArchiveError, CheckpointError) as error:
            self.partial.abandon(name)
            raise checkpoint_error(partial, error) from None
        return checkpoint

    def clear_interrupted(self, fence: Fence) -> list[str]:
        """Delete what interrupted writes left, if the owner of `fence` may, and return the names.

        Rank 0 only, before any rank writes.
        """
        found = [*self._folder.glob(".step-*"), *self._folder.glob(".abandoned-*")]
        left = sorted(path for path in found if fence.may_delete(writer_of(path.name)))
        for path in left:
            delete_folder(path)
        return [*(path.name for path in left), *self.stored.clear_interrupted(fence)]

    def _listed(self) -> list[tuple[Path, Checkpoint | ArchiveError]]:
        """Every checkpoint folder with its manifest or the manifest's fault, oldest step first."""
        found: list[tuple[Path, Checkpoint | ArchiveError]] = []
        for path in self._folder.glob("step-*"):
            try:
                found.append((path, read_manifest(path)))
            except ArchiveError as error:
                found.append((path, error))
        return sorted(found, key=_order)

    def complete(self) -> list[Checkpoint]:
        """All checkpoints with an intact manifest, by step, then by version. Others are logged and left out."""
        listed = [entry for _, entry in self._listed()]
        for entry in listed:
            if isinstance(entry, ArchiveError):
                log.warning("checkpoint skipped: %s", entry)
        return [entry for entry in listed if isinstance(entry, Checkpoint)]

    def newest_intact(self, up_to: int, refused: Collection[str] = ()) -> tuple[Checkpoint | None, dict[str, str]]:
        """The newest checkpoint up to step `up_to` whose files all match its manifest; None if there is none.

        The second value holds the newer checkpoints that were skipped: the reason by name. Those with `refused` names
        are not considered.
        """
        skipped: dict[str, str] = {}
        for path, entry in reversed(self._listed()):
            if _step(path) > up_to or path.name in refused:
                continue
            try:
                if isinstance(entry, ArchiveError):
                    raise entry
                self.check(entry)
            except ArchiveError as error:
                skipped[path.name] = str(error)
                if self.stored.remote:
                    _drop_states(path)
            else:
                return entry, skipped
        return None, skipped

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare every file with the manifest. Raises ArchiveError, naming the file."""
        self.stored.fetch(checkpoint.name)
        try:
            check_files(self.path(checkpoint), checkpoint.files)
        except ArchiveError as error:
            if not self.stored.remote:
                raise
            # The copy on this node is damaged; the one in the store may be intact.
            log.warning("checkpoint fetched again from the store: %s", error)
            for file in checkpoint.files:
                (self.path(checkpoint) / file).unlink(missing_ok=True)
            self.stored.fetch(checkpoint.name)

    def load(self, trainer: Restorable, name: str) -> None:
        """Load a checkpoint into the trainer. Collective. Raises ArchiveError."""
        folder = self._folder / name
        files = sorted(read_manifest(folder).files)
        trainer.restore([folder / file for file in files if file.endswith(STATE_SUFFIX)])

    def sampler(self, checkpoint: Checkpoint) -> str | None:
        """The content of the checkpoint's sampler.json; None if it has none."""
        return (self.path(checkpoint) / SAMPLER).read_text() if SAMPLER in checkpoint.files else None

    def prune(self, kept: int, up_to: int, fence: Fence, weights: Mapping[int, str] = {}) -> None:
        """Keep the newest checkpoint of each of the last `kept` steps up to `up_to` that have one; delete older ones.

        Once there are `kept` of them, also deletes the batches up to the oldest one. Until then all batches stay,
        because the run can still start from its model. What the owner of `fence` may not delete does not count and is
        not touched, nor is a checkpoint that is being written. `weights`: the digests of the committed weights, by
        step; a checkpoint with another one does not count, and is deleted.
        """
        listed = [found for found in self._listed() if _step(found[0]) <= up_to and fence.may_delete(_writer(*found))]
        complete = [(path, entry) for path, entry in listed if isinstance(entry, Checkpoint)]
        newest = {entry.step: path for path, entry in complete if entry.belongs_to(weights)}
        last = sorted(newest)[-kept:]
        if not last:
            return
        keep = {newest[step] for step in last}
        for path, entry in listed:
            if path not in keep and (isinstance(entry, Checkpoint) or _step(path) < last[0]):
                self._delete(path)
            elif self.stored.remote and path != newest[last[-1]]:
                _drop_states(path)
        for path in sorted(self._paths_set_aside()):
            if _step(path) < last[0] and fence.may_delete(writer_of(path.name)):
                self.stored.delete(path.name.removeprefix(DAMAGED).removeprefix(DIFFERS))
                if path.exists():
                    delete_folder(path)
        if len(last) == kept:
            self._archive.delete_batches(last[0], fence)

    def _paths_set_aside(self) -> set[Path]:
        """The paths of the checkpoints that were set aside. Those set aside on another node do not exist here."""
        stored = {self._folder / name for name in self.stored.names_set_aside()}
        return stored.union(*(self._folder.glob(f"{mark}step-*") for mark in (DAMAGED, DIFFERS)))

    def delete_after(self, step: int, fence: Fence) -> list[str]:
        """Delete the checkpoints after `step`, which are no longer in the run's history, and return their names.

        Only those that the owner of `fence` may delete.
        """
        later = [
            path for path, entry in self._listed() if _step(path) > step and fence.may_delete(_writer(path, entry))
        ]
        for path in later:
            self._delete(path)
        return [path.name for path in later]

    def set_aside(self, names: Iterable[str], fence: Fence, mark: str = DAMAGED) -> list[str]:
        """Rename checkpoints that are damaged, or that differ from the run's history, so that they do not count.

        Only those that the owner of `fence` may rename; returns their new names.
        """
        found = [name for name in names if fence.may_delete(writer_of(name))]
        for name in found:
            self.stored.set_aside(name, mark)
            (self._folder / name).rename(self._folder / f"{mark}{name}")
        return [f"{mark}{name}" for name in found]

    def _delete(self, path: Path) -> None:
        self.stored.delete(path.name)
        # The manifest first, so that an interrupted deletion leaves no incomplete checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _drop_states(path: Path) -> None:
    """Delete the ranks' files of a checkpoint on this node, because its scratch space has room for one checkpoint."""
    for file in path.glob(f"*{STATE_SUFFIX}*"):
        file.unlink(missing_ok=True)


def _writer(path: Path, entry: Checkpoint | ArchiveError) -> Fence:
    """The learner that wrote a checkpoint. Of older releases, only the manifest tells."""
    named = writer_of(path.name)
    return Fence(entry.epoch, entry.owner) if named == UNOWNED and isinstance(entry, Checkpoint) else named


def _order(listed: tuple[Path, Checkpoint | ArchiveError]) -> tuple[int, int, str]:
    path, found = listed
    return _step(path), found.version if isinstance(found, Checkpoint) else 0, path.name


def _step(path: Path) -> int:
    """The step in a folder's name; 0, which sorts first, if the name has no step."""
    written = written_by(path.name)
    return written[0] if written else 0
