"""Owns the second source of stream entries: the server's append-only file, for those trimmed before we read them.

Must not be needed: it is looked into only for what a reader of the streams has missed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any


def folder(server: Any) -> Path | None:
    """Where the server keeps its log; None where it keeps none, or not on this machine."""
    told = server.config_get("dir", "appenddirname", "appendonly")
    path = Path(told["dir"]) / told["appenddirname"]
    return path if told["appendonly"] == "yes" and path.is_dir() else None


def added_to(path: Path, stream: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """The entries that XADD has brought to a stream, oldest first, as far back as the log goes: (id, fields)."""
    wanted = stream.encode()
    for file in sorted(path.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3])):
        with file.open("rb") as opened:
            for command in _commands(opened):
                if len(command) > 4 and command[0].upper() == b"XADD" and command[1] == wanted:
                    # A function's `*` is logged as the id that it became; the fields are what stands behind it.
                    at = next(index for index, part in enumerate(command[2:], 2) if part.replace(b"-", b"").isdigit())
                    rest = command[at + 1 :]
                    yield command[at].decode(), dict(zip(rest[::2], rest[1::2], strict=True))


def missed(server: Any, stream: str, known: Collection[str]) -> list[tuple[str, dict[bytes, bytes]]]:
    """The entries of a stream whose ids are not `known`, as far as the server has logged them."""
    path = folder(server)
    return [] if path is None else [entry for entry in added_to(path, stream) if entry[0] not in known]


def _commands(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Each command of the log, as its parts; a last one that is cut off is left out."""
    while line := file.readline():
        if line.startswith(b"#"):
            continue  # a time stamp
        parts = []
        for _ in range(int(line[1:])):
            header = file.readline()
            size = int(header[1:]) if header[1:].strip().isdigit() else -1
            body = file.read(size + 2)
            if size < 0 or len(body) < size + 2:
                return
            parts.append(body[:-2])
        yield parts
