"""Owns a run's files beyond this node: each that is put there, by its name in the run's folder.

Must not know what the files mean. The order in which they are put and deleted is their owner's.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from services.storage import objects
from services.storage.errors import MissingObjectError, StoreError
from services.storage.places import StoreAddress, configured_store

SMALL_FILES, BIG_FILES = 16, 2
"""How many are fetched at once; a big one is fetched in many parts at once."""


class Mirror(Protocol):
    """Where the files of a run's folder are durable. All of it is blocking, and may raise StoreError."""

    @property
    def remote(self) -> bool:
        """Whether there is anything beyond the folder itself."""

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """Make a file durable, whole or not at all. Raises objects.UploadCancelledError once `stop` is set."""

    def say(self, name: str, content: bytes) -> None:
        """Put a small file that is not in the folder."""

    def read(self, name: str) -> bytes:
        """A small file's content. Raises MissingObjectError."""

    def listed(self, under: str = "") -> dict[str, int]:
        """The sizes of the files below `under`, by name in the run's folder, in order; empty where not `remote`."""

    def fetch(self, files: dict[str, int], folder: Path) -> list[str]:
        """Bring files, given with their sizes, to the run's `folder`; those that are there with that size stay.

        The names of what was brought. Raises MissingObjectError.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete these files."""

    def where(self, name: str, folder: Path) -> str:
        """The durable place of a name, for people."""


class NoMirror:
    """The folder itself is durable."""

    remote = False

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """Nothing is to be done."""

    def say(self, name: str, content: bytes) -> None:
        """Raises StoreError: there is no place beyond the folder."""
        raise StoreError(f"{name}: there is no store (PENSTOCK_STORE is not set)")

    def read(self, name: str) -> bytes:
        """Raises MissingObjectError: there is no place beyond the folder."""
        raise MissingObjectError(f"{name}: there is no store")

    def listed(self, under: str = "") -> dict[str, int]:
        """Empty."""
        return {}

    def fetch(self, files: dict[str, int], folder: Path) -> list[str]:
        """All is there."""
        return []

    def delete(self, names: Iterable[str]) -> None:
        """Nothing is to be done."""

    def where(self, name: str, folder: Path) -> str:
        """In the folder."""
        return str(folder / name)


class StoredMirror:
    """The files below an address of a store; the folder is scratch."""

    remote = True

    def __init__(self, at: StoreAddress) -> None:
        self._at = at

    def put(self, name: str, path: Path, stop: threading.Event | None = None) -> None:
        """See Mirror."""
        objects.put_file(self._at / name, path, stop)

    def say(self, name: str, content: bytes) -> None:
        """See Mirror."""
        objects.put_bytes(self._at / name, content)

    def read(self, name: str) -> bytes:
        """See Mirror."""
        return objects.get_bytes(self._at / name)

    def listed(self, under: str = "") -> dict[str, int]:
        """See Mirror."""
        found = objects.listed(self._at / under)
        return {f"{under}/{name}".lstrip("/"): one.size for name, one in found.items()}

    def fetch(self, files: dict[str, int], folder: Path) -> list[str]:
        """See Mirror. Safe while other processes fetch the same."""
        big = max(files.values(), default=0) > objects.PART_BYTES
        with ThreadPoolExecutor(BIG_FILES if big else SMALL_FILES) as threads:
            brought = threads.map(lambda one: bring(self._at / one[0], one[1], folder / one[0]), files.items())
            return [name for name, new in zip(files, brought, strict=True) if new]

    def delete(self, names: Iterable[str]) -> None:
        """See Mirror."""
        objects.delete(self._at, names)

    def where(self, name: str, folder: Path) -> str:
        """See Mirror."""
        return str(self._at / name)


NO_MIRROR = NoMirror()


def run_mirror(run: str) -> Mirror:
    """Where a run's files are durable, as PENSTOCK_STORE says. Raises StoreError for a value that is not accepted."""
    at = configured_store()
    return NO_MIRROR if at is None else StoredMirror(at / run)


def bring(at: StoreAddress, size: int, path: Path) -> bool:
    """Fetch an object of that size to `path`, by one rename; False where it was there. Raises StoreError, OSError."""
    if _there(path, size):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path):
        if _there(path, size):  # another process has fetched it meanwhile
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
    """Where `path` is before it is whole; always the same, so that the next to bring it replaces what was cut short."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep all other processes that see `path` from bringing the same; whoever dies lets go of it.

    The lock lies beside the place, for pods may share a claim and no other folder. Raises StoreError, OSError.
    """
    lock = path.with_name(f".{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(
                f"{lock}: cannot be locked ({error.strerror}); its file system has to know flock"
            ) from None
        yield
        # By now the path is there, as whoever waits for this lock or makes the next will see. After a failure it stays.
        lock.unlink(missing_ok=True)
