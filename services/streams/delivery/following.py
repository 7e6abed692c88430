"""Owns reading several streams at once, of any number of runs, for readers that each need all entries.

Must not admit what it reads: the bodies may be hostile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.streams.connection.client import Redis
from services.streams.connection.reading import read_together
from services.streams.keys import RunKeys

Entries = list[tuple[str, bytes]]
"""The (id, body) of entries of one stream, oldest first."""


async def read_after(redis: Redis, positions: Mapping[str, str], count: int, block_s: float) -> dict[str, Entries]:
    """Up to `count` entries of each stream after its id in `positions`; waits for the first at most `block_s` seconds.

    One command, however many streams: it takes one connection. Streams without such entries are left out.
    """
    reply = await redis.xread(dict(positions), count=count, block=max(1, int(block_s * 1000)))
    return {stream.decode(): _bodies(entries) for stream, entries in reply or []}


async def read_pages(redis: Redis, positions: Mapping[str, str], count: int) -> dict[str, Entries]:
    """Up to `count` entries of each stream after its id in `positions`, without waiting; [] where there are none."""
    pages = (("xrange", stream, f"({after}", "+", "COUNT", count) for stream, after in positions.items())
    found = await read_together(redis, *pages)
    return {stream: _bodies(entries) for stream, entries in zip(positions, found, strict=True)}


async def last_ids(redis: Redis, streams: Sequence[str]) -> dict[str, str]:
    """The id of each stream's newest entry; "0-0" where there is none."""
    found = await read_together(redis, *(("xrevrange", stream, "+", "-", "COUNT", 1) for stream in streams))
    return {
        stream: entries[0][0].decode() if entries else "0-0" for stream, entries in zip(streams, found, strict=True)
    }


async def read_standings(redis: Redis, runs: Sequence[str]) -> dict[str, tuple[bytes, bytes]]:
    """State and history (JSON) of runs, as their records have them; a run without a record is left out."""
    async with redis.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hmget(RunKeys(run).record, "state", "history")
        found = await pipe.execute()
    return {run: (state, history) for run, (state, history) in zip(runs, found, strict=True) if history is not None}


def _bodies(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Entries:
    return [(entry.decode(), fields.get(b"m", b"")) for entry, fields in entries]
