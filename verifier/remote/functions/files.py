"""Owns the files of functions: kept in memory by digest, laid out in a private folder for one process.

Must not trust a folder that a text's process could write to: it is compared before each use.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

FILE_BYTES = 8 << 20
STORE_BYTES = 128 << 20
IMPORTABLE = frozenset(f".{suffix.rpartition('.')[2]}" for suffix in importlib.machinery.all_suffixes())


class FileStore:
    """Contents by digest (SHA-256, hexadecimal); at most STORE_BYTES, the least recently used ones go first."""

    def __init__(self, size: int = STORE_BYTES) -> None:
        self._most_bytes = size
        self._bytes = 0
        self._contents: OrderedDict[str, bytes] = OrderedDict()

    def put(self, content: bytes) -> str:
        """Keep a content; returns its digest."""
        digest = digest_of(content)
        self._bytes += len(content) - len(self._contents.pop(digest, b""))
        self._contents[digest] = content
        while self._bytes > self._most_bytes:
            _, dropped = self._contents.popitem(last=False)
            self._bytes -= len(dropped)
        return digest

    def missing(self, digests: Mapping[str, str]) -> list[str]:
        """The digests among these values that are not kept."""
        return sorted({digest for digest in digests.values() if digest not in self._contents})

    def contents(self, digests: Mapping[str, str]) -> dict[str, bytes]:
        """The contents by name. Raises KeyError for one that is missing."""
        for digest in digests.values():
            self._contents.move_to_end(digest)
        return {name: self._contents[digest] for name, digest in digests.items()}


class Layout:
    """Files by name (`./rewards.py`) in a private folder of their own. Raises OSError."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-function-")).resolve()
        try:
            for name, content in contents.items():
                path = self.folder / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o400)
        except OSError:
            self.remove()
            raise
        self._data = {self.folder / name: _state(self.folder / name) for name in contents}
        self._code = self._importable()

    def intact(self) -> bool:
        """Whether the files are as they were laid out, and nothing else that Python can import is beside them."""
        try:
            return self._importable() == self._code and all(_state(path) == was for path, was in self._data.items())
        except OSError:
            return False

    def _importable(self) -> set[Path]:
        return {path for path in self.folder.rglob("*") if path.suffix in IMPORTABLE}

    def remove(self) -> None:
        """Remove the folder and all that was written into it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def digest_of(content: bytes) -> str:
    """The digest that names a content."""
    return hashlib.sha256(content).hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """What differs after any change to a file; its owner cannot set the time of the last change back."""
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
