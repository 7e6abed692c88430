"""Owns checkpoints that are being written: their folder, the files of all ranks in it, and the cleanup after a failure.

Must not complete a checkpoint, nor touch a complete one, except in scratch space.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from learner.archive import CHECKPOINTS, RunArchive, owned_name, writer_of
from learner.checkpoint.manifest import CheckpointError, write_hashed
from learner.checkpoint.remote import StoredCheckpoints
from learner.checkpoint.reports import (
    RETRY_FOR_S,
    FolderReports,
    RankReport,
    RankReports,
    StoredReports,
    retry_during_outage,
    state_file,
)
from services.contracts import Fence
from services.storage.errors import StoreError
from services.storage.objects import UploadCancelledError

log = logging.getLogger(__name__)


class Writable(Protocol):
    """A copy of one rank's state, which no longer changes."""

    def chunks(self) -> Iterator[memoryview]:
        """The content of the rank's file, in order."""


class PartialCheckpoints:
    """The checkpoints of one run that are not committed. Methods block, and with a store raise StoreError."""

    def __init__(self, archive: RunArchive, stored: StoredCheckpoints) -> None:
        self._folder = archive.checkpoints
        self._stored = stored

    def path(self, name: str) -> Path:
        """The folder of a checkpoint until its commit."""
        return self._folder / f".{name}"

    def reports(self, name: str) -> RankReports:
        """Where the ranks report on a checkpoint: in its folder, or in the store."""
        if self._stored.remote:
            return StoredReports(self._stored.mirror, f"{CHECKPOINTS}/{name}")
        return FolderReports(self.path(name))

    def start(self, step: int, fence: Fence) -> str:
        """Create the folder of a checkpoint after `step`. Returns its name, for `write`. Raises CheckpointError.

        `fence`: of the learner that writes it, whose epoch and id are in the name.
        """
        name = f"{owned_name(step, fence)}.{secrets.token_hex(4)}"
        try:
            self.path(name).mkdir(parents=True)
        except OSError as error:
            raise checkpoint_error(self.path(name), error) from None
        return name

    def started_on_other_node(self, name: str) -> bool:
        """Whether rank 0 started this checkpoint on another node. Call it while rank 0 cannot abandon it."""
        return self._stored.remote and not self.path(name).is_dir()

    def write(
        self, name: str, rank: int, state: Writable, stop: threading.Event, *, on_other_node: bool = False
    ) -> None:
        """Write a rank's file and report success, or delete the file and report why it failed. Raises CheckpointError.

        Fails once `stop` is set. `on_other_node`: rank 0 is on another node and cleans the scratch space of that node
        only, so no file is left here.
        """
        file, reports = self.path(name) / state_file(rank), self.reports(name)
        # Rank 0 notices its own failure at once. Another rank must reach the store to report a failure, so it retries.
        bound_s = RETRY_FOR_S if rank else 0.0
        try:
            if on_other_node:
                self._clear_scratch(name)
            facts = write_hashed(file, state.chunks(), stop)
            retry_during_outage(lambda: self._stored.put(name, file, stop), stop, bound_s)
            if on_other_node:
                file.unlink()
            report = RankReport(files={file.name: facts})
            retry_during_outage(lambda: reports.write(rank, report), stop, bound_s)
        except FileNotFoundError:
            raise CheckpointError(f"{file}: abandoned by rank 0") from None
        except (OSError, CheckpointError, UploadCancelledError) as error:
            failure = checkpoint_error(file, error)
            try:
                file.unlink(missing_ok=True)
                reports.write(rank, RankReport(error=str(failure)))
            except OSError as second:
                log.warning("the failure could not be reported; rank 0 notices it at its deadline: %s", second)
            raise failure from None

    def _clear_scratch(self, name: str) -> None:
        fence = writer_of(name)
        for path in self._folder.glob("*step-*"):
            if path != self.path(name) and fence.may_delete(writer_of(path.name)):
                shutil.rmtree(path, ignore_errors=True)  # other ranks on this node do the same
        self.path(name).mkdir(parents=True, exist_ok=True)

    def abandon(self, name: str) -> None:
        """Delete what was written of an incomplete checkpoint. A rank that still writes to it will fail."""
        self._abandon_folder(name)
        try:
            self._stored.delete(name)
        except StoreError as error:
            log.warning("files of an abandoned checkpoint stay in the store until the run is resumed: %s", error)

    def _abandon_folder(self, name: str) -> None:
        gone = self._folder / f".abandoned-{name}"
        try:
            # After this, no rank can create a file in it.
            self.path(name).rename(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("an abandoned checkpoint could not be deleted: %s", error)
        else:
            delete_folder(gone)


def checkpoint_error(path: Path, error: Exception) -> CheckpointError:
    """Convert an error raised while `path` was written to a CheckpointError."""
    if isinstance(error, OSError):
        return CheckpointError(f"{path}: could not be written ({error.strerror})")
    return error if isinstance(error, CheckpointError) else CheckpointError(str(error))


def delete_folder(path: Path) -> None:
    """Delete a folder that is not a checkpoint. Failures are logged; a later call can retry them."""
    shutil.rmtree(path, onerror=lambda _, where, error: log.warning("%s could not be deleted: %s", where, error[1]))
