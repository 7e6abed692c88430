"""Owns how rank 0 hears that all ranks have written their files of a checkpoint: in its folder, or in the store.

Must not know what the files hold, nor make a checkpoint of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from learner.archive import ArchiveError, read_message, write_message
from learner.checkpoint.manifest import STATE_SUFFIX, CheckpointError
from services.contracts import Value
from services.storage.errors import StoreAwayError
from services.storage.facts import FileFacts
from services.storage.mirror import Mirror

log = logging.getLogger(__name__)

INSISTING_S, AGAIN_S = 120.0, 5.0
"""Seconds for which a rank tries to reach the store when others rely on it, and seconds between its tries."""


class Part(Value):
    """rank-0001.json, until all have written: what a rank wrote, by file name, or why it could not."""

    files: dict[str, FileFacts] = Field(default_factory=dict)
    error: str = ""


def state_file(rank: int) -> str:
    """The name of a rank's tensors."""
    return f"rank-{rank:04d}{STATE_SUFFIX}"


def word_file(rank: int) -> str:
    """The name of a rank's word that they are there."""
    return f"rank-{rank:04d}.json"


class Parts(Protocol):
    """Where the ranks say so."""

    poll_s: float

    def say(self, rank: int, part: Part) -> None:
        """A rank's word. Raises OSError."""

    def heard(self, ranks: Collection[int]) -> dict[int, tuple[Part, int]]:
        """The words of those of `ranks` that have spoken, and the size of the file that is there of each."""

    def forget(self, ranks: Collection[int]) -> None:
        """Delete the words."""


class FolderParts:
    """All ranks see one folder."""

    poll_s = 0.1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def say(self, rank: int, part: Part) -> None:
        """See Parts."""
        write_message(self._folder / word_file(rank), part)

    def heard(self, ranks: Collection[int]) -> dict[int, tuple[Part, int]]:
        """See Parts. Raises OSError, ArchiveError."""
        spoken = [rank for rank in ranks if (self._folder / word_file(rank)).exists()]
        parts = {rank: read_message(self._folder / word_file(rank), Part) for rank in spoken}
        return {rank: (part, self._size(rank) if part.files else 0) for rank, part in parts.items()}

    def _size(self, rank: int) -> int:
        return (self._folder / state_file(rank)).stat().st_size

    def forget(self, ranks: Collection[int]) -> None:
        """See Parts."""
        for rank in ranks:
            (self._folder / word_file(rank)).unlink()


class StoredParts:
    """Each rank sees its own node and the store."""

    poll_s = 1.0

    def __init__(self, mirror: Mirror, under: str) -> None:
        self._mirror = mirror
        self._under = under

    def say(self, rank: int, part: Part) -> None:
        """See Parts."""
        self._mirror.put_bytes(f"{self._under}/{word_file(rank)}", part.model_dump_json().encode())

    def heard(self, ranks: Collection[int]) -> dict[int, tuple[Part, int]]:
        """See Parts. Raises StoreError, ArchiveError."""
        try:
            there = self._mirror.listed(self._under)
            names = {rank: f"{self._under}/{word_file(rank)}" for rank in ranks}
            words = {rank: self._mirror.read(name) for rank, name in names.items() if name in there}
        except StoreAwayError as error:
            log.warning("the ranks' words on a checkpoint are looked for again: %s", error)
            return {}
        return {
            rank: (_part(word, names[rank]), there.get(f"{self._under}/{state_file(rank)}", 0))
            for rank, word in words.items()
        }

    def forget(self, ranks: Collection[int]) -> None:
        """See Parts."""
        self._mirror.delete([f"{self._under}/{word_file(rank)}" for rank in ranks])


def _part(word: bytes, name: str) -> Part:
    try:
        return Part.model_validate_json(word)
    except ValidationError:
        raise ArchiveError(f"{name}: damaged") from None


def all_parts(parts: Parts, ranks: int, stop: threading.Event, deadline_s: float) -> dict[str, FileFacts]:
    """The files of all ranks, once there; what said so is deleted.

    Raises CheckpointError if one failed or is late, or once `stop` is set; OSError, ArchiveError.
    """
    ends = time.monotonic() + deadline_s
    missing = set(range(ranks))
    files: dict[str, FileFacts] = {}
    while True:
        for rank, (part, size) in parts.heard(sorted(missing)).items():
            files |= _checked(rank, part, size)
            missing.remove(rank)
        if not missing:
            break
        if time.monotonic() > ends:
            raise CheckpointError(f"ranks {sorted(missing)} did not write their files within {deadline_s:g} s")
        if stop.wait(parts.poll_s):
            raise CheckpointError("the learner stops")
    insist(lambda: parts.forget(range(ranks)), stop)
    return files


def insist(do: Callable[[], None], stop: threading.Event, bound_s: float = INSISTING_S) -> None:
    """Do something, and again for `bound_s` while the store is away, or until `stop` is set. Raises what it raises."""
    ends = time.monotonic() + bound_s
    while True:
        try:
            do()
        except StoreAwayError as error:
            if time.monotonic() >= ends or stop.wait(AGAIN_S):
                raise
            log.warning("%s; trying again", error)
        else:
            return


def _checked(rank: int, part: Part, size: int) -> dict[str, FileFacts]:
    if part.error:
        raise CheckpointError(part.error)
    written = part.files[state_file(rank)].size
    if size != written:
        raise CheckpointError(f"{state_file(rank)}: has {size} bytes, though {written} were written")
    return part.files
