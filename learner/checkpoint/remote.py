"""Owns a run's checkpoints in the store: list, fetch, upload, set aside and delete them.

Must not decide which one is used. Without a store, its methods do nothing.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from learner.archive import CHECKPOINTS, DIFFERS, ArchiveError, RunArchive, writer_of
from learner.checkpoint.manifest import MANIFEST, SAMPLER, check_files, read_manifest
from services.contracts import Fence
from services.storage.errors import MissingObjectError

DAMAGED = "damaged-"


class StoredCheckpoints:
    """The store's side of `Checkpoints`. A checkpoint exists there once its manifest does. Raises StoreError."""

    def __init__(self, archive: RunArchive) -> None:
        self.mirror = archive.mirror
        self._run = archive.folder
        self._folder = archive.checkpoints

    @property
    def remote(self) -> bool:
        """Whether the run has a store."""
        return self.mirror.remote

    def fetch_manifests(self) -> None:
        """Make this node list the store's checkpoints: fetch their manifests, and delete all other checkpoints.

        The ranks' files stay in the store until `fetch`.
        """
        if not self.remote:
            return
        stored = self.mirror.listed(CHECKPOINTS)
        names = {_name(file) for file in stored if file.endswith(f"/{MANIFEST}")}
        for path in self._folder.glob("step-*"):
            if path.name in names:
                (path / MANIFEST).unlink(missing_ok=True)
            else:
                shutil.rmtree(path, ignore_errors=True)
        small = {
            file: size for file, size in stored.items() if _name(file) in names and file.endswith((MANIFEST, SAMPLER))
        }
        self.mirror.fetch(small, self._run)

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """Upload a file of a checkpoint."""
        self.mirror.put(f"{CHECKPOINTS}/{name}/{path.name}", path, stop)

    def fetch(self, name: str) -> None:
        """Fetch all files of a checkpoint to this node. Raises ArchiveError if one is missing or damaged."""
        if not self.remote:
            return
        folder, under = self._folder / name, f"{CHECKPOINTS}/{name}"
        try:
            stored = self.mirror.listed(under)
            manifest = {file: size for file, size in stored.items() if file == f"{under}/{MANIFEST}"}
            self.mirror.fetch(manifest, self._run)
            files = {f"{under}/{file}": facts for file, facts in read_manifest(folder).files.items()}
            for file, facts in files.items():
                if stored.get(file) != facts.size:
                    fault = f"damaged (it has {stored[file]} bytes)" if file in stored else "missing"
                    raise ArchiveError(f"{self.mirror.location(file, self._run)}: {fault}")
            fetched = self.mirror.fetch({file: facts.size for file, facts in files.items()}, self._run)
        except MissingObjectError as error:
            raise ArchiveError(str(error)) from None
        check_files(self._run, {file: files[file] for file in fetched})

    def clear_interrupted(self, fence: Fence) -> list[str]:
        """Delete what interrupted writes left, if the owner of `fence` may, and return the names.

        Keeps checkpoints, including those set aside.
        """
        stored = self.mirror.listed(CHECKPOINTS)
        known = {_name(file) for file in stored if file.endswith(MANIFEST)}
        left = sorted(name for name in {_name(file) for file in stored} - known if fence.may_delete(writer_of(name)))
        self.mirror.delete([file for file in stored if _name(file) in left])
        return left

    def set_aside(self, name: str, mark: str) -> None:
        """Keep the files of a checkpoint, but no longer count it as one. `mark`: why, as the start of a name."""
        if self.remote:
            self.mirror.put_bytes(f"{CHECKPOINTS}/{name}/{mark}{MANIFEST}", b"{}")
            self.mirror.delete([f"{CHECKPOINTS}/{name}/{MANIFEST}"])

    def names_set_aside(self) -> list[str]:
        """The names of the checkpoints that were set aside, each after its mark."""
        listed = self.mirror.listed(CHECKPOINTS)
        return [
            f"{mark}{_name(file)}"
            for mark in (DAMAGED, DIFFERS)
            for file in listed
            if file.endswith(f"/{mark}{MANIFEST}")
        ]

    def delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that an interruption leaves no incomplete checkpoint."""
        under = f"{CHECKPOINTS}/{name}"
        self.mirror.delete([f"{under}/{MANIFEST}"])
        self.mirror.delete(self.mirror.listed(under))


def _name(file: str) -> str:
    return file.split("/")[1]
