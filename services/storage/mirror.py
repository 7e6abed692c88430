"""Owns the durable copies of a run's files, in a store or in the run's folder itself.

Must not know what the files mean. Their owner decides when they are put and deleted.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from services.storage import objects
from services.storage.errors import MissingObjectError, StoreError
from services.storage.places import StoreAddress, configured_store

MARK = ".penstock-runs"
"""A file in the folder of runs; its text is no other folder's."""
SMALL_FILES, BIG_FILES = 16, 2
"""How many files are fetched at once; a big one is fetched in many parts at once."""


class Mirror:
    """Where the files of a run's folder are durable: here the folder itself, so that nothing is copied.

    All methods block, and may raise StoreError.
    """

    remote = False
    """Whether files are copied to a store."""

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """Make a file durable, whole or not at all. Raises objects.UploadCancelledError once `stop` is set."""

    def put_bytes(self, name: str, content: bytes) -> None:
        """Put a small file that is not in the folder. Raises StoreError without a store."""
        raise StoreError(f"{name}: there is no store (PENSTOCK_STORE is not set)")

    def read(self, name: str) -> bytes:
        """A small file's content. Raises MissingObjectError."""
        raise MissingObjectError(f"{name}: there is no store")

    def listed(self, under: str = "") -> dict[str, int]:
        """The sizes of the files below `under`, by name in the run's folder, in order; empty if not `remote`."""
        return {}

    def fetch(self, files: dict[str, int], folder: Path) -> list[str]:
        """Fetch files, given with their sizes, to the run's `folder`, unless they are there with that size.

        Returns the names of the fetched files. Raises MissingObjectError.
        """
        return []

    def delete(self, names: Iterable[str]) -> None:
        """Delete these files from the store."""

    def location(self, name: str, folder: Path) -> str:
        """The durable location of a file, for messages."""
        return str(folder / name)


class StoredMirror(Mirror):
    """Copies below an address of a store; the folder is scratch space."""

    remote = True

    def __init__(self, at: StoreAddress) -> None:
        self._at = at

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """See Mirror."""
        objects.put_file(self._at / name, path, stop)

    def put_bytes(self, name: str, content: bytes) -> None:
        """See Mirror."""
        objects.put_bytes(self._at / name, content)

    def read(self, name: str) -> bytes:
        """See Mirror."""
        return objects.get_bytes(self._at / name)

    def listed(self, under: str = "") -> dict[str, int]:
        """See Mirror."""
        found = objects.listed(self._at / under)
        return {f"{under}/{name}".lstrip("/"): entry.size for name, entry in found.items()}

    def fetch(self, files: dict[str, int], folder: Path) -> list[str]:
        """See Mirror. Several processes may fetch the same files at once."""
        big = max(files.values(), default=0) > objects.PART_BYTES
        with ThreadPoolExecutor(BIG_FILES if big else SMALL_FILES) as threads:
            fetched = threads.map(
                lambda file: fetch_object(self._at / file[0], file[1], folder / file[0]), files.items()
            )
            return [name for name, new in zip(files, fetched, strict=True) if new]

    def delete(self, names: Iterable[str]) -> None:
        """See Mirror."""
        objects.delete(self._at, names)

    def location(self, name: str, folder: Path) -> str:
        """See Mirror."""
        return str(self._at / name)


NO_MIRROR = Mirror()


def run_mirror(run: str) -> Mirror:
    """Where a run's files are durable, according to PENSTOCK_STORE. Raises StoreError for a value that is not valid."""
    at = configured_store()
    return NO_MIRROR if at is None else StoredMirror(at / run)


def files_place(runs: Path) -> str:
    """Where the files of runs are durable, as their records say: the store, or else this very folder of runs.

    A mark in the folder identifies it, because hosts and paths change. Raises StoreError, OSError.
    """
    if at := configured_store():
        return str(at)
    mark = runs / MARK
    if not mark.exists():
        runs.mkdir(parents=True, exist_ok=True)
        partial = mark.with_name(f"{MARK}.{uuid.uuid4().hex}")
        partial.write_text(f"the runs folder {uuid.uuid4().hex}")
        with suppress(FileExistsError):  # written by another thread or process: its mark counts
            os.link(partial, mark)
        partial.unlink()
    return mark.read_text()


def places_here(runs: Path) -> set[str]:
    """All that `files_place` has said of this platform's runs: also the folder, if it had no store before.

    Raises StoreError, OSError.
    """
    mark = runs / MARK
    return {files_place(runs), *([mark.read_text()] if mark.exists() else ())}


def fetch_object(at: StoreAddress, size: int, path: Path) -> bool:
    """Fetch an object of that size to `path`, by one rename; False if it was there. Raises StoreError, OSError."""
    if _there(path, size):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path):
        if _there(path, size):  # another process has fetched it in the meantime
            return False
        partial = partial_of(path)
        try:
            objects.get_file(at, size, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return True


def _there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def partial_of(path: Path) -> Path:
    """The name of `path` until it is whole; always the same, so that the next fetch replaces an interrupted one."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock `path`, so that no other process that sees it fetches the same. The lock of a process that dies is released.

    The lock file is beside the path, because pods may share a volume and no other folder. Raises StoreError, OSError.
    """
    lock = path.with_name(f".{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(
                f"{lock}: cannot be locked ({error.strerror}); its file system must support flock"
            ) from None
        yield
        # The path exists now, as every process that waits for this lock will see. After a failure the lock file stays.
        lock.unlink(missing_ok=True)
