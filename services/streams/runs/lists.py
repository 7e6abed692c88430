"""Owns lists of runs: pages of them, the newest first, and how many there are. Both cost the same beside a long past.

Must not change a record.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from services.contracts import RunState
from services.streams.connection.client import Redis
from services.streams.connection.reading import read_together
from services.streams.keys import ANY_WORD, CLOSED, CLOSED_WORDS, OPEN_WORDS, RUNS, UNREADABLE, run_list
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RecordReader

SCANNED_AT_MOST = 2_000
"""Runs whose ids one page looks at: with a filter by name, a page may be short, and still have a next one."""
NAMED_AT_ONCE = 500
INDEXED_AT_ONCE = 200
CURSOR = re.compile(r"(?P<at>-?[0-9][0-9.e+-]{0,31}):(?P<run>[a-z0-9-]{1,96})", re.ASCII)


class CursorError(ValueError):
    """The text is no cursor of a list."""


class Cursor(NamedTuple):
    """The place of a run in lists: the time of its creation (Unix seconds), and its id."""

    at: float
    run: str

    def __str__(self) -> str:
        """As clients get it."""
        return f"{self.at!r}:{self.run}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor that a client sends back. Raises CursorError."""
        if match := CURSOR.fullmatch(text):
            with suppress(ValueError):
                return cls(float(match["at"]), match["run"])
        raise CursorError(f"after: {text[:200]!r} is not valid: expected the `next` of a page")


@dataclass(frozen=True)
class RunFilter:
    """Which runs a list has. None or empty: all. `name`: a part of the id. `archived`: whether they are closed."""

    projects: frozenset[str] | None = None
    states: frozenset[RunState] = frozenset()
    archived: bool | None = None
    name: str = ""

    @property
    def words(self) -> list[str]:
        """The words of the lists that have these runs."""
        shelves = {None: (*OPEN_WORDS, *CLOSED_WORDS), False: OPEN_WORDS, True: CLOSED_WORDS}
        if not self.states and self.archived is None:
            return [ANY_WORD]
        found = shelves[self.archived]
        return [word for word in found if not self.states or word.removesuffix(CLOSED) in self.states]

    def lists(self) -> list[str]:
        """The keys of the indices that have these runs, each of them in one."""
        projects = [ANY_WORD] if self.projects is None else sorted(self.projects)
        return [run_list(project, word) for project in projects for word in self.words]

    def admits(self, record: RunRecord) -> bool:
        """Whether a record is as its index says: a process of an earlier release does not keep the indices."""
        return (
            (self.projects is None or record.project in self.projects)
            and (not self.states or record.state in self.states)
            and (self.archived is None or bool(record.closing) is self.archived)
        )


@dataclass(frozen=True)
class RunPage:
    """Runs, the newest first. `next`: where the next page starts; None: there is none."""

    records: list[RunRecord]
    next: Cursor | None


class StateCounts(NamedTuple):
    """How many runs are in each state. `unlisted`: how many an earlier release added to no list of a state."""

    states: Counter[RunState]
    unlisted: int


class RunLists:
    """The lists of all runs of one Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._reader = RecordReader(redis)

    async def page(self, wanted: RunFilter, limit: int, after: Cursor | None = None) -> RunPage:
        """Up to `limit` runs after a cursor. An index that is out of line with a record is repaired on the way."""
        lists, found, scanned = wanted.lists(), list[RunRecord](), 0
        while scanned < SCANNED_AT_MOST:
            count = max(limit - len(found) + 1, NAMED_AT_ONCE if wanted.name else 0)
            places = await self._places(lists, after, count)
            records = await self._records(wanted, places, limit - len(found))
            for place, record in records:
                if len(found) == limit:
                    return RunPage(found, after)
                after = place
                if record is not None:
                    found.append(record)
            scanned += len(records)
            if len(records) == len(places) < count:
                return RunPage(found, None)
        return RunPage(found, after)

    async def _records(
        self, wanted: RunFilter, places: list[Cursor], limit: int
    ) -> list[tuple[Cursor, RunRecord | None]]:
        """Per place its record, None if it is not wanted; not much beyond `limit` wanted ones."""
        named, upto = list[str](), 0
        for upto, place in enumerate(places, 1):  # noqa: B007 - read after the loop
            if wanted.name in place.run:
                named.append(place.run)
            if len(named) > limit:
                break
        records = await self._reader.shown_together(named)
        for run in named:
            if run not in records or not wanted.admits(records[run]):
                await self._reader.index(run)
        if lost := [run for run in named if run not in records]:
            for key in wanted.lists():
                await self._redis.zrem(key, *lost)
        return [
            (place, record if (record := records.get(place.run)) and wanted.admits(record) else None)
            for place in places[:upto]
        ]

    async def _places(self, lists: Iterable[str], after: Cursor | None, count: int) -> list[Cursor]:
        """The first `count` places of lists after a cursor, the newest first."""
        found, open_lists, offset, size = list[Cursor](), list(lists), 0, count + 1
        while open_lists:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in open_lists:
                    newest = "+inf" if after is None else repr(after.at)
                    pipe.zrange(key, newest, "-inf", desc=True, byscore=True, offset=offset, num=size, withscores=True)
                replies = await pipe.execute()
            parts = [[Cursor(at, run.decode()) for run, at in reply] for reply in replies]
            kept = [[place for place in part if after is None or place < after] for part in parts]
            found += [place for part in kept for place in part]
            # Many runs may have been created at the time of the cursor: then a list has to be read on.
            open_lists = [
                key
                for key, part, left in zip(open_lists, parts, kept, strict=True)
                if len(part) == size and len(left) < count
            ]
            offset += size
        return sorted(found, reverse=True)[:count]

    async def states(self) -> StateCounts:
        """How many runs are in each state."""
        words = [*OPEN_WORDS, *CLOSED_WORDS]
        lists = [RUNS, *(run_list(word=word) for word in words)]
        total, *sizes = await read_together(self._redis, *(("zcard", name) for name in lists))
        counts: Counter[RunState] = Counter()
        for word, size in zip(words, sizes, strict=True):
            if word != UNREADABLE:
                counts[RunState(word.removesuffix(CLOSED))] += size
        return StateCounts(counts, total - sum(sizes))

    async def repair(self) -> None:
        """Bring all indices in line with the records of all runs: an earlier release did not keep them."""
        runs = [run.decode() for run in await self._redis.zrange(RUNS, 0, -1)]
        for start in range(0, len(runs), INDEXED_AT_ONCE):
            await asyncio.gather(*(self._reader.index(run) for run in runs[start : start + INDEXED_AT_ONCE]))
