"""Owns a run's checkpoints on disk: written whole, found again, deleted when newer ones suffice.

Must not decide when to write one, nor import torch. What a rank's file holds is the trainer's; here it is bytes.
Where a store makes the run durable, a checkpoint is one once its manifest is there, under the same names; the folder
then is scratch: of checkpoints that others wrote it has the manifests, and their files once they are needed.

    checkpoints/.step-000010-3f9a2c1b/       being written; one rename makes it the next line
    checkpoints/step-000010-3f9a2c1b/
        rank-0000.safetensors                by that rank, see training_state
        rank-0000.json                       until all have written: that the rank has, or that it could not
        sampler.json                         what the sampler wants to know when the run goes on; not ours to read
        checkpoint.json                      written last, with the digest of every file; without it: no checkpoint
    checkpoints/damaged-step-000010-3f9a2c1b/    set aside: it was to be used and could not be

In a store a damaged one keeps its name, and its manifest is called damaged-checkpoint.json.

A checkpoint of step k holds the policy after rollout step k: training or replay of step k + 1 begins with it. A name is
never used again, so that no checkpoint has to go before another of its step is whole.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from learner.archive import CHECKPOINTS, FIRST_STEP, ArchiveError, RunArchive, step_name
from learner.checkpoint.manifest import (
    MANIFEST,
    SAMPLER,
    STATE_SUFFIX,
    Checkpoint,
    CheckpointError,
    Consumed,
    Cut,
    check_files,
    read_manifest,
    sync_folder,
    write_hashed,
    write_manifest,
)
from learner.checkpoint.remote import DAMAGED, StoredCheckpoints
from learner.checkpoint.shards import INSISTING_S, FolderParts, Part, Parts, StoredParts, all_parts, insist, state_file
from services.storage.errors import StoreError
from services.storage.objects import UploadCancelledError

log = logging.getLogger(__name__)

FOLDER = re.compile(r"step-(\d{6,})-[0-9a-f]{8}$")
WRITING_S = 1800.0
"""Seconds that rank 0 waits for all ranks' files."""


class Writable(Protocol):
    """A copy of what one rank keeps; nobody changes it any more."""

    def chunks(self) -> Iterator[memoryview]:
        """The content of the rank's file, front to back."""


class Restorable(Protocol):
    """What reads itself back; collective on all ranks."""

    def restore(self, files: Sequence[Path]) -> None:
        """Read what all ranks wrote."""


class Checkpoints:
    """The checkpoints of one run. Blocking. Ranks only `write` and `load`; all else is rank 0's, or only looks.

    One at a time is written: `begin` by rank 0, `write` by every rank, `commit` by rank 0. None of this is collective.
    With a store, `stored.take_in` comes first and `stored.fetch` before `load`. What reaches for it raises StoreError.
    """

    def __init__(self, archive: RunArchive) -> None:
        self._archive = archive
        self._folder = archive.checkpoints
        self.stored = StoredCheckpoints(archive)

    def path(self, checkpoint: Checkpoint) -> Path:
        """The folder of a checkpoint."""
        return self._folder / checkpoint.name

    def _partial(self, name: str) -> Path:
        return self._folder / f".{name}"

    def _parts(self, name: str) -> Parts:
        if self.stored.remote:
            return StoredParts(self.stored.mirror, f"{CHECKPOINTS}/{name}")
        return FolderParts(self._partial(name))

    def begin(self, step: int) -> str:
        """Make room for a checkpoint behind `step`: its name, for the ranks to `write` to. Raises CheckpointError."""
        name = f"{step_name(step)}-{secrets.token_hex(4)}"
        try:
            self._partial(name).mkdir(parents=True)
        except OSError as error:
            raise _failed(self._partial(name), error) from None
        return name

    def elsewhere(self, name: str) -> bool:
        """Whether rank 0 has begun this checkpoint on another node; to be asked while it cannot give it up."""
        return self.stored.remote and not self._partial(name).is_dir()

    def write(
        self, name: str, rank: int, state: Writable, stop: threading.Event, *, elsewhere: bool = False
    ) -> None:  # fmt: skip
        """Write a rank's file and say so, or leave none and say why. Raises CheckpointError; `stop` is one reason.

        `elsewhere` than rank 0 nobody else clears up this node's scratch, so nothing is left on it.
        """
        file, parts = self._partial(name) / state_file(rank), self._parts(name)
        # Rank 0 hears of its own failure at once, of another rank's only by the store that the rank cannot reach.
        bound_s = INSISTING_S if rank else 0.0
        try:
            if elsewhere:
                self._clear_scratch(name)
            facts = write_hashed(file, state.chunks(), stop)
            insist(lambda: self.stored.put(name, file, stop), stop, bound_s)
            if elsewhere:
                file.unlink()
            insist(lambda: parts.say(rank, Part(files={file.name: facts})), stop, bound_s)
        except FileNotFoundError:
            raise CheckpointError(f"{file}: given up by rank 0") from None
        except (OSError, CheckpointError, UploadCancelledError) as error:
            failure = _failed(file, error)
            try:
                file.unlink(missing_ok=True)
                parts.say(rank, Part(error=str(failure)))
            except OSError as second:
                log.warning("rank 0 will hear of it at its deadline only: %s", second)
            raise failure from None

    def _clear_scratch(self, name: str) -> None:
        for path in self._folder.glob("*step-*"):
            if path != self._partial(name):
                shutil.rmtree(path, ignore_errors=True)  # other ranks of this node do the same
        self._partial(name).mkdir(parents=True, exist_ok=True)

    def commit(
        self, name: str, cut: Cut, stop: threading.Event, *, sampler: str | None = None,
        consumed: Consumed | None = None, deadline_s: float = WRITING_S,
    ) -> Checkpoint:  # fmt: skip
        """Wait until all ranks have written, and make a checkpoint of it. Reads none of it again.

        `sampler` becomes its sampler.json. `consumed`: the groups of each step as far as the caller knows them; those
        of other steps since the checkpoint before are read from the archive.
        Raises CheckpointError, and then nothing of it is left; not because the store is away for a moment, though.
        """
        partial = self._partial(name)
        try:
            files = all_parts(self._parts(name), cut.ranks, stop, deadline_s)
            if sampler is not None:
                files[SAMPLER] = write_hashed(partial / SAMPLER, [memoryview(sampler.encode())], stop)
                insist(lambda: self.stored.put(name, partial / SAMPLER), stop)
            checkpoint = Checkpoint(
                **cut.model_dump(), name=name, consumed=self._consumed(cut.step, consumed or {}), files=files
            )
            checkpoint = write_manifest(partial, checkpoint)
            insist(lambda: self.stored.put(name, partial / MANIFEST), stop)
            partial.rename(self._folder / name)
            sync_folder(self._folder)
        except (OSError, ArchiveError, CheckpointError) as error:
            self.abandon(name)
            raise _failed(partial, error) from None
        return checkpoint

    def abandon(self, name: str) -> None:
        """Delete what was written of a checkpoint that is not to be. A rank that still writes to it will fail."""
        self._give_up(name)
        try:
            self.stored.delete(name)
        except StoreError as error:
            log.warning("left in the store until the run is taken up again: %s", error)

    def _give_up(self, name: str) -> None:
        gone = self._folder / f".abandoned-{name}"
        try:
            # After this no rank can put a file into it.
            self._partial(name).rename(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("left as it is: %s", error)
        else:
            _clear(gone)

    def clear(self) -> list[str]:
        """Delete what interrupted writes left, and return their names. By rank 0, before any rank writes."""
        left = sorted([*self._folder.glob(".step-*"), *self._folder.glob(".abandoned-*")])
        for path in left:
            _clear(path)
        return [*(path.name for path in left), *self.stored.clear()]

    def _consumed(self, step: int, known: Consumed) -> Consumed:
        """The archived batches stay at least until the next checkpoint. Raises ArchiveError."""
        before = max((one.step for one in self.complete() if one.step < step), default=FIRST_STEP - 1)
        wanted = range(before + 1, step + 1)
        read = [self._archive.batch(one) for one in wanted if one not in known]
        found = known | {batch.step: tuple(group.group for group in batch.groups) for batch in read}
        return {one: found[one] for one in wanted}

    def _listed(self) -> list[tuple[Path, Checkpoint | ArchiveError]]:
        """Every folder of a checkpoint and what its manifest says, oldest step first."""
        found: list[tuple[Path, Checkpoint | ArchiveError]] = []
        for path in self._folder.glob("step-*"):
            try:
                found.append((path, read_manifest(path)))
            except ArchiveError as error:
                found.append((path, error))
        return sorted(found, key=_order)

    def complete(self) -> list[Checkpoint]:
        """All checkpoints with a manifest that is whole, oldest step first, of a step's several the latest last; others
        are logged and left out.
        """
        listed = [one for _, one in self._listed()]
        for error in listed:
            if isinstance(error, ArchiveError):
                log.warning("passed over: %s", error)
        return [one for one in listed if isinstance(one, Checkpoint)]

    def newest_whole(self, up_to: int) -> tuple[Checkpoint | None, dict[str, str]]:
        """The newest checkpoint at or below step `up_to` of which every bit is as it was written; and what was passed
        over on the way there, by name, and why.
        """
        passed_over: dict[str, str] = {}
        for path, found in reversed(self._listed()):
            if _step(path) > up_to:
                continue
            try:
                if isinstance(found, ArchiveError):
                    raise found
                self.check(found)
            except ArchiveError as error:
                passed_over[path.name] = str(error)
                if self.stored.remote:
                    _drop_states(path)
            else:
                return found, passed_over
        return None, passed_over

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare every file with the manifest. Raises ArchiveError, naming the file."""
        self.stored.fetch(checkpoint.name)
        try:
            check_files(self.path(checkpoint), checkpoint.files)
        except ArchiveError as error:
            if not self.stored.remote:
                raise
            # What this node kept is damaged; the store's may be whole.
            log.warning("fetched again: %s", error)
            for file in checkpoint.files:
                (self.path(checkpoint) / file).unlink(missing_ok=True)
            self.stored.fetch(checkpoint.name)

    def load(self, trainer: Restorable, name: str) -> None:
        """Bring the trainer to where the checkpoint stands. Collective. Raises ArchiveError."""
        folder = self._folder / name
        files = sorted(read_manifest(folder).files)
        trainer.restore([folder / file for file in files if file.endswith(STATE_SUFFIX)])

    def sampler(self, checkpoint: Checkpoint) -> str | None:
        """What was committed as the sampler's; None where nothing was."""
        return (self.path(checkpoint) / SAMPLER).read_text() if SAMPLER in checkpoint.files else None

    def prune(self, kept: int) -> None:
        """Keep the newest checkpoint of each of the last `kept` steps that have one, and the batches behind the oldest.

        While there are fewer, the run's model is where one can begin, and all batches stay. What is being written is
        left alone.
        """
        listed = self._listed()
        newest = {one.step: path for path, one in listed if isinstance(one, Checkpoint)}
        last = sorted(newest)[-kept:]
        if not last:
            return
        keep = {newest[step] for step in last}
        for path, found in listed:
            if path not in keep and (isinstance(found, Checkpoint) or _step(path) < last[0]):
                self._delete(path)
            elif self.stored.remote and path != newest[last[-1]]:
                _drop_states(path)
        for path in sorted(self._set_aside()):
            if _step(path) < last[0]:
                self.stored.delete(path.name.removeprefix(DAMAGED))
                if path.exists():
                    _clear(path)
        if len(last) == kept:
            self._archive.forget_batches(last[0])

    def _set_aside(self) -> set[Path]:
        """Where each that was set aside lies here, or would: it may have been on another node."""
        stored = {self._folder / f"{DAMAGED}{name}" for name in self.stored.set_asides()}
        return stored | set(self._folder.glob(f"{DAMAGED}step-*"))

    def discard_after(self, step: int) -> list[str]:
        """Delete the checkpoints behind later steps, which have left the run's history, and return their names."""
        later = [path for path, _ in self._listed() if _step(path) > step]
        for path in later:
            self._delete(path)
        return [path.name for path in later]

    def set_aside(self, names: Iterable[str]) -> None:
        """Count damaged checkpoints no more, or `prune` would take them for ones to go back to."""
        for name in names:
            self.stored.set_aside(name)
            (self._folder / name).rename(self._folder / f"{DAMAGED}{name}")

    def _delete(self, path: Path) -> None:
        self.stored.delete(path.name)
        # Without its manifest a folder is no checkpoint, should deletion be interrupted.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _drop_states(path: Path) -> None:
    """Scratch has room for one checkpoint: delete what this node has of the ranks' files, cut short or not."""
    for file in path.glob(f"*{STATE_SUFFIX}*"):
        file.unlink(missing_ok=True)


def _failed(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, OSError):
        return CheckpointError(f"{path}: could not be written ({error.strerror})")
    return error if isinstance(error, CheckpointError) else CheckpointError(str(error))


def _order(listed: tuple[Path, Checkpoint | ArchiveError]) -> tuple[int, int, str]:
    path, found = listed
    return _step(path), found.version if isinstance(found, Checkpoint) else 0, path.name


def _step(path: Path) -> int:
    """0 for a folder that has no such name: it comes before every other."""
    match = FOLDER.search(path.name)
    return int(match[1]) if match else 0


def _clear(path: Path) -> None:
    """Delete what counts for nothing; what cannot be deleted now may be later."""
    shutil.rmtree(path, onerror=lambda _, where, error: log.warning("not deleted: %s: %s", where, error[1]))
