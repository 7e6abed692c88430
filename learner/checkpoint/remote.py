"""Owns a run's checkpoints beyond this node: which there are, their files brought here, put, set aside and deleted.

Must not decide which of them is used. Without a store there are none, and nothing is done.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from learner.archive import CHECKPOINTS, ArchiveError, RunArchive
from learner.checkpoint.manifest import MANIFEST, SAMPLER, check_files, read_manifest
from services.storage.errors import MissingObjectError

DAMAGED = "damaged-"


class StoredCheckpoints:
    """The store's side of `Checkpoints`. A checkpoint is one there once its manifest is. Raises StoreError."""

    def __init__(self, archive: RunArchive) -> None:
        self.mirror = archive.mirror
        self._run = archive.folder
        self._folder = archive.checkpoints

    @property
    def remote(self) -> bool:
        """Whether there is a store."""
        return self.mirror.remote

    def take_in(self) -> None:
        """Know here which checkpoints the store holds, and no others; their files stay where they are."""
        if not self.remote:
            return
        stored = self.mirror.listed(CHECKPOINTS)
        names = {_name(file) for file in stored if file.endswith(f"/{MANIFEST}")}
        for path in self._folder.glob("step-*"):
            if path.name in names:
                (path / MANIFEST).unlink(missing_ok=True)
            else:
                shutil.rmtree(path, ignore_errors=True)
        told = {f: size for f, size in stored.items() if _name(f) in names and f.endswith((MANIFEST, SAMPLER))}
        self.mirror.fetch(told, self._run)

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """Put a file of a checkpoint."""
        self.mirror.put(f"{CHECKPOINTS}/{name}/{path.name}", path, stop)

    def fetch(self, name: str) -> None:
        """Bring all files of a checkpoint to this node. Raises ArchiveError if one is not whole."""
        if not self.remote:
            return
        folder, under = self._folder / name, f"{CHECKPOINTS}/{name}"
        try:
            stored = self.mirror.listed(under)
            told = {file: size for file, size in stored.items() if file == f"{under}/{MANIFEST}"}
            self.mirror.fetch(told, self._run)
            files = {f"{under}/{file}": facts for file, facts in read_manifest(folder).files.items()}
            for file, facts in files.items():
                if stored.get(file) != facts.size:
                    fault = f"damaged (it has {stored[file]} bytes)" if file in stored else "missing"
                    raise ArchiveError(f"{self.mirror.location(file, self._run)}: {fault}")
            brought = self.mirror.fetch({file: facts.size for file, facts in files.items()}, self._run)
        except MissingObjectError as error:
            raise ArchiveError(str(error)) from None
        check_files(self._run, {file: files[file] for file in brought})

    def clear(self) -> list[str]:
        """Delete what is no checkpoint and was not set aside, and return the names."""
        stored = self.mirror.listed(CHECKPOINTS)
        known = {_name(file) for file in stored if file.endswith(MANIFEST)}
        left = sorted({_name(file) for file in stored} - known)
        self.mirror.delete([file for file in stored if _name(file) in left])
        return left

    def set_aside(self, name: str) -> None:
        """Have it count no more, and keep it."""
        if self.remote:
            self.mirror.put_bytes(f"{CHECKPOINTS}/{name}/{DAMAGED}{MANIFEST}", b"{}")
            self.mirror.delete([f"{CHECKPOINTS}/{name}/{MANIFEST}"])

    def set_asides(self) -> list[str]:
        """The names of those."""
        marks = [file for file in self.mirror.listed(CHECKPOINTS) if file.endswith(f"/{DAMAGED}{MANIFEST}")]
        return [_name(file) for file in marks]

    def delete(self, name: str) -> None:
        """Its manifest goes first: without it what is left is no checkpoint."""
        under = f"{CHECKPOINTS}/{name}"
        self.mirror.delete([f"{under}/{MANIFEST}"])
        self.mirror.delete(self.mirror.listed(under))


def _name(file: str) -> str:
    return file.split("/")[1]
