"""Owns the file that `penstock data to-integer` writes: lines in the order of the rows, continued when interrupted.

Must not rewrite a problem.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from deploy.cli.data.rewriting import Problem
from services.settings.faults import invalid

DIGEST_CHARACTERS = 16
DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")
ORIGINAL = "original"
"""The field that only rewritten rows have."""


class OutputError(ValueError):
    """The output file cannot be continued. The text names it and its line."""


class _Line(NamedTuple):
    row: int
    digest: str
    rewritten: bool


def digest_of(problem: Problem) -> str:
    """What a line remembers of the row that it came from."""
    return hashlib.sha256(json.dumps(problem).encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


class WrittenRows:
    """The rows in a file to which more are appended.

    `last`: the number of the last one; 0 without any. `rewritten`: whether a model has rewritten one of them.
    """

    def __init__(self, file: BinaryIO, digests: Mapping[int, str], rewritten: bool) -> None:
        self._file, self._digests, self.rewritten = file, digests, rewritten
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
def opened(path: Path, source: Path) -> Iterator[WrittenRows]:
    """The file, continued after its last whole line; `source` is INPUT. Raises OutputError, OSError.

    Nothing is written to a file that is INPUT, or that this module did not write.
    """
    if path.exists() and path.samefile(source):
        raise OutputError(invalid("OUTPUT", str(path), "another file than INPUT"))
    path.touch()
    with path.open("r+b") as file:
        digests, rewritten, whole = dict[int, str](), False, 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not digests:  # nothing shows that this module wrote it
                    raise _foreign(path, f"line {number} has no end")
                break  # cut off by an interruption
            found = _line(path, number, line)
            digests[found.row] = found.digest
            rewritten = rewritten or found.rewritten
            whole += len(line)
        file.seek(whole)
        file.truncate()
        yield WrittenRows(file, digests, rewritten)
        os.fsync(file.fileno())


def _line(path: Path, number: int, line: bytes) -> _Line:
    try:
        found = json.loads(line)
        row, digest = found["row"], found["digest"]
    except (ValueError, TypeError, KeyError, RecursionError):
        row, digest = None, None
    if type(row) is not int or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise _foreign(path, f"line {number}")
    return _Line(row, digest, ORIGINAL in found)


def _foreign(path: Path, where: str) -> OutputError:
    return OutputError(invalid("OUTPUT", str(path), f"a new file, or one that this command wrote ({where})"))
