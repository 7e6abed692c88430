"""Owns how ended runs stand: their states and since when, by their indices, without their records.

Must not change anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from services.contracts import RunState
from services.streams.connection.client import Redis
from services.streams.keys import ENDED_RUNS, UNCLOSED_RUNS, RunKeys

READ_AT_ONCE = 500
"""Runs per round trip."""


class End(NamedTuple):
    """The end of a run: its id, and when (Unix seconds)."""

    run: str
    at: float


async def newest_ends(redis: Redis, after: float, most: int) -> list[End]:
    """The last `most` ends after a time, the newest first."""
    return await _ends(redis, ENDED_RUNS, "+inf", repr(after), 0, most, newest_first=True)


async def unclosed_before(redis: Redis, before: float, first: int, most: int) -> list[End]:
    """Ends of runs that are not closed, before a time, the oldest first: `most` of them, from number `first` on."""
    return await _ends(redis, UNCLOSED_RUNS, "-inf", repr(before), first, most)


async def ended_before(redis: Redis, before: float, first: int, most: int) -> list[End]:
    """Ends of runs before a time, the oldest first: `most` of them, from number `first` on."""
    return await _ends(redis, ENDED_RUNS, "-inf", repr(before), first, most)


async def _ends(
    redis: Redis, key: str, start: str, end: str, first: int, most: int, *, newest_first: bool = False
) -> list[End]:
    found = await redis.zrange(
        key, start, end, desc=newest_first, byscore=True, offset=first, num=most, withscores=True
    )
    return [End(run.decode(), at) for run, at in found]


async def states_of(redis: Redis, runs: Collection[str]) -> dict[str, RunState]:
    """The states of runs; those without a record, or with a state that this release does not know, are left out."""
    values = await _field_of(redis, runs, "state")
    known = {state.value.encode(): state for state in RunState}
    return {run: known[value] for run, value in values.items() if value in known}


async def places_of(redis: Redis, runs: Collection[str]) -> dict[str, str]:
    """Where the files of runs are (see RunRecord); "" if that is not known."""
    return {
        run: (value or b"").decode(errors="replace") for run, value in (await _field_of(redis, runs, "place")).items()
    }


async def _field_of(redis: Redis, runs: Collection[str], field: str) -> dict[str, bytes | None]:
    names, found = list(runs), dict[str, bytes | None]()
    for start in range(0, len(names), READ_AT_ONCE):
        part = names[start : start + READ_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipe:
            for run in part:
                pipe.hget(RunKeys(run).record, field)
            found |= zip(part, await pipe.execute(), strict=True)
    return found
