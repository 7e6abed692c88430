"""Owns how the files of a data source are opened, with the errors of a source.

Must not know their format.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import BinaryIO

from services.sampler.data.rows import DataError
from services.storage.errors import StoreError
from services.storage.roots.opening import open_named


def open_rows(path: Path, name: str) -> BinaryIO:
    """A file of a source, to read; `name`: its setting and path as errors name them. Raises DataError, OSError."""
    try:
        return open_named(path, name.partition(": ")[0])
    except StoreError as error:
        raise DataError(str(error)) from None


def part_of(folder: Path, part: object, name: str) -> Path:
    """What a list in a folder calls one of its files or folders. Raises DataError if that leads out of it."""
    text = str(part)
    if text in ("", "..") or PurePath(text).name != text or "\0" in text:
        raise DataError(f"{name} is not valid: expected lists of files and splits that lie in that folder itself")
    return folder / text
