"""Owns the second source of stream entries: the server's append-only file, with entries trimmed before they were read.

Must not be the main source: it is read only for entries that a reader of the streams has missed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any


def folder(server: Any) -> Path | None:
    """The folder of the server's append-only file; None if it has none, or not on this machine."""
    settings = server.config_get("dir", "appenddirname", "appendonly")
    path = Path(settings["dir"]) / settings["appenddirname"]
    return path if settings["appendonly"] == "yes" and path.is_dir() else None


def added_to(path: Path, stream: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """The entries that XADD added to a stream, oldest first, as far back as the file goes: (id, fields)."""
    wanted = stream.encode()
    for file in sorted(path.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3])):
        with file.open("rb") as opened:
            for command in _commands(opened):
                if len(command) > 4 and command[0].upper() == b"XADD" and command[1] == wanted:
                    # A function's `*` is logged as the resulting id; the fields follow it.
                    at = next(index for index, part in enumerate(command[2:], 2) if part.replace(b"-", b"").isdigit())
                    rest = command[at + 1 :]
                    yield command[at].decode(), dict(zip(rest[::2], rest[1::2], strict=True))


def missed(server: Any, stream: str, known: Collection[str]) -> list[tuple[str, dict[bytes, bytes]]]:
    """The logged entries of a stream whose ids are not `known`."""
    path = folder(server)
    return [] if path is None else [entry for entry in added_to(path, stream) if entry[0] not in known]


def _commands(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Each command of the file, as its parts; a truncated last one is left out."""
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
