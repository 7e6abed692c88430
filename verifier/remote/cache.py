"""Owns the cache of a judge model's scores: least recently used ones are dropped, and equal questions are asked once.

Must not outlive its process, nor keep a failure.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

ENTRY_BYTES = 400
"""Of an entry beside its reason: its digest, its number and the objects that hold them."""


@dataclass(frozen=True)
class Grade:
    """A judge's score in [0, 1] and its reason, of one line."""

    score: float
    reason: str


@dataclass
class _InFlight:
    task: asyncio.Task[Grade]
    waiting: int = 0


class GradeCache:
    """Grades by the digest of their question, at most `entries` of them and `size` bytes."""

    def __init__(self, entries: int = 50_000, size: int = 32 << 20) -> None:
        self._most_entries = entries
        self._most_bytes = size
        self._grades: OrderedDict[bytes, Grade] = OrderedDict()
        self._bytes = 0
        self._in_flight: dict[bytes, _InFlight] = {}

    async def grade(self, digest: bytes, ask: Callable[[], Awaitable[Grade]]) -> Grade:
        """The grade of this question, from the cache, from an equal question in flight, or from `ask`.

        Raises what `ask` raises, to all that wait for it. It is cancelled when no caller waits for it any more.
        """
        if (found := self._grades.get(digest)) is not None:
            self._grades.move_to_end(digest)
            return found
        asked = self._in_flight.get(digest)
        if asked is None:
            asked = self._in_flight[digest] = _InFlight(asyncio.ensure_future(self._asked(digest, ask)))
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                if self._in_flight.get(digest) is asked:
                    del self._in_flight[digest]
                if not asked.task.done():
                    asked.task.cancel()
                    await asyncio.wait([asked.task])

    async def _asked(self, digest: bytes, ask: Callable[[], Awaitable[Grade]]) -> Grade:
        grade = await ask()
        self._keep(digest, grade)
        return grade

    def _keep(self, digest: bytes, grade: Grade) -> None:
        self._grades[digest] = grade
        self._bytes += _size(grade)
        while len(self._grades) > self._most_entries or self._bytes > self._most_bytes:
            _, dropped = self._grades.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(grade: Grade) -> int:
    return ENTRY_BYTES + len(grade.reason.encode(errors="replace"))
