"""Owns the file that `penstock data to-integer` writes: lines in the order of the rows, continued when interrupted.

Must not rewrite a problem.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from deploy.cli.data.rewriting import Problem
from services.settings.faults import invalid

DIGEST_CHARACTERS = 16


class OutputError(ValueError):
    """The output file cannot be continued. The text names it and its line."""


def digest_of(problem: Problem) -> str:
    """What a line remembers of the row that it came from."""
    return hashlib.sha256(json.dumps(problem).encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


class WrittenRows:
    """The rows in a file to which more are appended. `last`: the number of the last one; 0 without any."""

    def __init__(self, file: BinaryIO, digests: Mapping[int, str]) -> None:
        self._file, self._digests = file, digests
        self.last = max(digests, default=0)

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, row: int, problem: Problem) -> None:
        """Raise OutputError if the line of this row was made from another problem."""
        if row in self._digests and self._digests[row] != digest_of(problem):
            raise OutputError(
                f"OUTPUT: {self._file.name!r} is not valid: expected lines of INPUT, but row {row} differs"
            )

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, whole."""
        self._file.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        self._file.flush()


@contextmanager
def opened(path: Path) -> Iterator[WrittenRows]:
    """The file, continued after its last whole line. Raises OutputError, OSError."""
    path.touch()
    with path.open("r+b") as file:
        digests, whole = dict[int, str](), 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # cut off by an interruption
            row, digest = _row(path, number, line)
            digests[row] = digest
            whole += len(line)
        file.seek(whole)
        file.truncate()
        yield WrittenRows(file, digests)
        os.fsync(file.fileno())


def _row(path: Path, number: int, line: bytes) -> tuple[int, str]:
    try:
        found = json.loads(line)
        return int(found["row"]), str(found["digest"])
    except (ValueError, TypeError, KeyError, RecursionError):
        expected = f"a new file, or one that this command wrote (line {number})"
        raise OutputError(invalid("OUTPUT", str(path), expected)) from None
