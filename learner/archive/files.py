"""Owns how a file of a run's folder is written, completely or not at all, and how its damage is told.

Must not know what a file means.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from services.contracts import Value

V = TypeVar("V", bound=Value)


class ArchiveError(RuntimeError):
    """A file of a run's folder is missing or damaged. The text names it."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to `path` after the body, and deleted if the body raises.

    Its name is random, because processes on several machines may have one process id and write to one folder.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_message(path: Path, message: Value) -> None:
    """Write a pydantic value as JSON, completely or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(message.model_dump_json())


def read_message(path: Path, model: type[V]) -> V:
    """Read what `write_message` wrote. Raises ArchiveError, naming the file."""
    return parse_message(path, read_file(path), model)


def read_file(path: Path) -> bytes:
    """A file's content. Raises ArchiveError, naming the file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ArchiveError(f"{path}: missing") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None


def parse_message(path: Path, content: bytes, model: type[V]) -> V:
    """The pydantic value in the content of the file at `path`. Raises ArchiveError, naming the file."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArchiveError(f"{path}: damaged ({where}: {first['msg']})".replace("(: ", "(")) from None


def digest_of(fields: Mapping[str, Any]) -> str:
    """The SHA-256 of the fields of a JSON document, independent of their order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
