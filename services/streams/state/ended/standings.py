"""Owns how runs stand: their states and since when, read without their records.

Must not change anything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import NamedTuple

from services.contracts import Closing, RunState
from services.streams.connection.client import Redis
from services.streams.keys import RUNS, RunKeys
from services.streams.state.run_record import has_work

log = logging.getLogger(__name__)

READ_AT_ONCE = 500
"""Runs per round trip."""


class Standing(NamedTuple):
    """A run's state, since when (Unix seconds), whether it is closed, and where its files are (see RunRecord)."""

    state: RunState
    since: float
    closing: Closing | None = None
    place: str = ""

    @property
    def active(self) -> bool:
        """Whether the controller has work for the run."""
        return has_work(self.state, self.closing)


async def count_runs(redis: Redis) -> int:
    """The number of all runs."""
    return int(await redis.zcard(RUNS))


async def standing_runs(redis: Redis, runs: Collection[str] | None = None) -> dict[str, Standing]:
    """How these runs stand, or all runs; one without a record is left out, and one that is damaged is logged."""
    names = [run.decode() for run in await redis.zrange(RUNS, 0, -1)] if runs is None else list(runs)
    found = {}
    for start in range(0, len(names), READ_AT_ONCE):
        part = names[start : start + READ_AT_ONCE]
        async with redis.pipeline(transaction=False) as pipe:
            for run in part:
                pipe.hmget(RunKeys(run).record, "state", "history", "closing", "place")
            replies = await pipe.execute()
        for run, (state, history, closing, place) in zip(part, replies, strict=True):
            if state is None:
                continue
            try:
                since = float(json.loads(history)[-1]["at"])
                closed = Closing(closing.decode()) if closing else None
                found[run] = Standing(RunState(state.decode()), since, closed, (place or b"").decode())
            except (ValueError, LookupError, TypeError) as error:
                log.warning("run %s: its record is damaged: %s", run, error)
    return found
