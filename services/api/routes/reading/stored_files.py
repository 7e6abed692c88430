"""Owns reading single files of a run, from its folder or the store: listed, and in parts.

Must not follow a symbolic link, nor leave the run's folder. Methods block.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from services.storage import objects
from services.storage.errors import MissingObjectError
from services.storage.facts import FileFacts, facts_of
from services.storage.mirror import run_mirror
from services.storage.places import configured_store, runs_folder

MOST_FILES = 10_000
MOST_MANIFEST = 16 << 20
DIGESTS_KEPT = 4096


class MissingFileError(LookupError):
    """The run has no such file."""


@dataclass(frozen=True)
class Readable:
    """A file that is open for reading. `read`: bytes from an offset; call `close` at the end. `tag`: of its content."""

    size: int
    tag: str
    read: Callable[[int, int], bytes]
    close: Callable[[], None]


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of a file's name below a folder. Raises MissingFileError for one that could lead out of it."""
    parts = tuple(name.split("/"))
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts) or len(name) > 1000:
        raise MissingFileError(f"file {name[:200]!r} does not exist")
    return parts


def listed(run: str, under: str) -> dict[str, int]:
    """The sizes of the files below a folder of the run, by name below it. Raises StoreError, OSError."""
    if configured_store():
        found = run_mirror(run).listed(under)
        return {name.removeprefix(f"{under}/"): size for name, size in found.items()}
    return dict(sorted(_walk(runs_folder() / run / under)))


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    count = 0
    if folder.is_symlink() or folder.parent.is_symlink():
        return
    for place, folders, names in os.walk(folder):  # which enters no symbolic link
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place) / name
            with suppress(FileNotFoundError):  # replaced or deleted meanwhile
                found = path.lstat()
                # What no address can name is not listed: text that is no UTF-8, or with line ends.
                if stat.S_ISREG(found.st_mode) and not name.startswith(".") and name.isprintable():
                    count += 1
                    yield str(path.relative_to(folder)), found.st_size
            if count == MOST_FILES:
                return


def opened(run: str, name: str) -> Readable:
    """A file of the run, by its name in the run's folder. Raises MissingFileError, StoreError, OSError."""
    parts = parts_of(name)
    if at := configured_store():
        address = at / run / name
        found = objects.head(address)
        if found is None:
            raise MissingFileError(f"file {name[:200]!r} does not exist")
        return Readable(found.size, found.tag, lambda start, size: objects.get_part(address, start, size), lambda: None)
    return _opened_here(parts, runs_folder() / run)


def _opened_here(parts: tuple[str, ...], root: Path) -> Readable:
    """Folder by folder, so that none of them can be a link, nor become one meanwhile."""
    file = folder = -1
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
    except OSError:
        if file >= 0:
            os.close(file)
        raise MissingFileError(f"file {'/'.join(parts)[:200]!r} does not exist") from None
    finally:
        if folder >= 0:
            os.close(folder)
    tag = f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"
    return Readable(found.st_size, tag, lambda start, size: os.pread(file, size, start), lambda: os.close(file))


def manifest_of(run: str, name: str) -> Mapping[str, object]:
    """A JSON document of the run's folder, or {} if it is missing or damaged. Raises StoreError."""
    try:
        found = opened(run, name)
    except (MissingFileError, MissingObjectError):
        return {}
    try:
        document = json.loads(found.read(0, min(found.size, MOST_MANIFEST))) if found.size else {}
    except (ValueError, RecursionError):
        return {}
    finally:
        found.close()
    return document if isinstance(document, dict) else {}


def digests_in(manifest: Mapping[str, object]) -> dict[str, str]:
    """The SHA-256 of files by name, where a manifest states them."""
    files = manifest.get("files")
    found = files if isinstance(files, dict) else {}
    return {
        str(name): facts["sha256"]
        for name, facts in found.items()
        if isinstance(facts, dict) and isinstance(facts.get("sha256"), str)
    }


def digest_here(run: str, name: str) -> str | None:
    """The SHA-256 of a file of the run's folder, which is read whole unless it was before; None without it."""
    if configured_store():
        return None
    path = runs_folder() / run / name
    try:
        found = path.lstat()
        return _digest(path, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
    except OSError:  # replaced or deleted meanwhile
        return None


@lru_cache(maxsize=DIGESTS_KEPT)
def _digest(path: Path, _size: int, _changed_ns: int) -> str:
    facts: FileFacts = facts_of(path)
    return facts.sha256
