"""Owns the facts of a file's content: its size and digest, and whether a file still matches them.

Must not know where files are kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from services.contracts import Value


class FileFacts(Value):
    """A file: its size in bytes, and SHA-256 as hexadecimal digits."""

    size: int
    sha256: str


def facts_of(path: Path) -> FileFacts:
    """The facts of the file, which is read whole. Raises OSError."""
    with path.open("rb") as file:
        return FileFacts(size=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def matches(path: Path, facts: FileFacts) -> bool:
    """Whether the file has this content; it is read only if its size is right. Raises OSError."""
    return path.stat().st_size == facts.size and facts_of(path) == facts


def digest_of(files: Mapping[str, FileFacts]) -> str:
    """SHA-256 over the names, sizes and digests of files, as hexadecimal digits."""
    lines = sorted(f"{name}\t{facts.size}\t{facts.sha256}" for name, facts in files.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
