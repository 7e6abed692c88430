"""Owns how a file that a recipe names is opened: below an allowed root also at the moment it is opened.

Must not read more of a file than its caller allows, nor put any of it into an error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from services.storage.errors import StoreError
from services.storage.roots.allowed import (
    AllowedRoots,
    PathFaultError,
    RootsError,
    fault_text,
    load_roots,
)

MOST_TEMPLATE_BYTES = 256 * 1024
MOST_ENTRIES = 100_000
"""Of a folder that a recipe names; a larger one would be walked for minutes."""
MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
KINDS = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
    stat.S_ISLNK: "a link, made while it was opened",
}
PLAIN = "a file or a folder"


def place_of(text: str, field: str) -> Path:
    """The place of a path that a recipe's `field` names, links resolved, and of all that a folder there holds.

    It need not exist. Raises StoreError, which names both.
    """
    try:
        roots = load_roots()
        place = roots.resolved(text)
        if os.path.isdir(place):
            _check_entries(place, roots)
        elif kind := _special(place):
            raise PathFaultError(f"{PLAIN}; it is {kind}")
    except RootsError as error:
        raise StoreError(str(error)) from None
    except PathFaultError as error:
        raise StoreError(fault_text(field, text, error)) from None
    return place


def check_address(text: str, field: str) -> None:
    """Check an address in a store that a recipe's `field` names. Raises StoreError, which names both."""
    try:
        load_roots().address(text)
    except RootsError as error:
        raise StoreError(str(error)) from None
    except PathFaultError as error:
        raise StoreError(fault_text(field, text, error)) from None


def open_plain(place: Path) -> BinaryIO:
    """A regular file at a resolved place, to read. Raises OSError, PathFaultError.

    Each part of the path is opened below the one before, and no link is followed: a part that became a link since the
    place was resolved is refused. Neither a pipe nor a device is opened.
    """
    folder = os.open(place.anchor, _FOLDER)
    try:
        for part in place.parts[1:-1]:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        if kind := _kind(os.stat(place.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise PathFaultError(f"a regular file; it is {kind}")
        file = os.fdopen(os.open(place.name, _FILE, dir_fd=folder), "rb")
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # exchanged since the line above
        file.close()
        raise PathFaultError("a regular file")
    return file


def open_named(path: Path, field: str) -> BinaryIO:
    """A regular file at a path that a recipe's `field` names, or that lies in a folder which it names; to read.

    Raises StoreError, which names both, and OSError.
    """
    try:
        return open_plain(place_of(str(path), field))
    except PathFaultError as error:
        raise StoreError(fault_text(field, str(path), error)) from None


def read_text(text: str, field: str, most_bytes: int = MOST_TEMPLATE_BYTES) -> str:
    """The UTF-8 text of a file that a recipe's `field` names. Raises StoreError, which holds nothing of the text."""
    try:
        with open_named(Path(text), field) as file:
            content = file.read(most_bytes + 1)
    except StoreError:  # an OSError too
        raise
    except OSError as error:
        raise StoreError(fault_text(field, text, f"a readable file ({error.strerror})")) from None
    if len(content) > most_bytes:
        raise StoreError(fault_text(field, text, f"a file of at most {most_bytes} bytes"))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise StoreError(fault_text(field, text, f"a file in UTF-8 (byte {error.start + 1} is not)")) from None


def existence_fault(place: Path, roots: AllowedRoots, *, folder: bool | None) -> str:
    """What is expected in place of a resolved place that this machine knows to be unfit; "" if it is fit, or unknown.

    `folder`: whether a folder (True) or a file (False) is wanted; None: either.
    """
    wanted = PLAIN if folder is None else "a folder" if folder else "a file"
    try:
        mode = place.stat().st_mode
    except OSError as error:
        # The processes that read it may see more than this one, and check it again.
        return f"{wanted} that exists" if error.errno in MISSING and roots.is_here(place) else ""
    if folder is not None and stat.S_ISDIR(mode) != folder:
        return f"{wanted}; it is {'a file' if folder else 'a folder'}"
    kind = None if stat.S_ISDIR(mode) else _kind(mode)
    return f"{wanted}; it is {kind}" if kind else ""


_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _check_entries(folder: Path, roots: AllowedRoots) -> None:
    """Check what a folder holds: nothing but files and folders, and no link out of the roots. Raises PathFaultError."""
    for count, entry in enumerate(_entries(folder)):
        if count >= MOST_ENTRIES:
            raise PathFaultError(f"a folder with at most {MOST_ENTRIES} entries")
        name = str(Path(entry.path).relative_to(folder))[:80]
        if entry.is_symlink():
            try:
                roots.resolved(entry.path)
            except PathFaultError:
                raise PathFaultError(f"a folder without links out of {roots}; {name!r} is one") from None
        if kind := _special(Path(entry.path)):
            raise PathFaultError(f"a folder of files and folders; {name!r} is {kind}")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries below a folder; links are not followed."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError as error:
            raise PathFaultError(f"a folder that can be read ({error.strerror})") from None


def _special(place: Path) -> str | None:
    """What the place is in words if it is neither file nor folder; None if it is one, or is missing."""
    try:
        mode = place.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISDIR(mode) else _kind(mode)


def _kind(mode: int) -> str | None:
    """What is not a regular file, in words; None for one."""
    if stat.S_ISREG(mode):
        return None
    return next((text for is_kind, text in KINDS.items() if is_kind(mode)), "a folder")
