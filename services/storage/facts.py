"""Owns what is known of a file's content: its size and digest, and whether a file still has them.

Must not know where files are kept.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from services.contracts import Value


class FileFacts(Value):
    """A file: its size in bytes, and SHA-256 as hexadecimal digits."""

    size: int
    sha256: str


def facts_of(path: Path) -> FileFacts:
    """Read the file and tell. Raises OSError."""
    with path.open("rb") as file:
        return FileFacts(size=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def matches(path: Path, facts: FileFacts) -> bool:
    """Whether the file is as it was; read only where the size is right. Raises OSError."""
    return path.stat().st_size == facts.size and facts_of(path) == facts
