"""Owns the REST route of a run's unknown verdicts.

Must not trust one: its texts come from models and rewards.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query

from services.api.dead_letters import ENTRY, EXCERPT
from services.api.views import UnknownView
from services.contracts import UnknownVerdict
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.rewards.unknown import last_unknown, unknown_verdicts
from services.streams.state.runs import RunRecords


def add_unknown_route(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    """Add the route /v1/runs/{run}/unknown."""

    @app.get("/v1/runs/{run}/unknown")
    async def unknown(run: str, after: Annotated[str, Query(pattern=ENTRY)] = "0-0") -> list[UnknownView]:
        """Up to 200 of the last unknown verdicts after the one whose entry is `after`, oldest first."""
        await records.get(run)
        return [_view(entry, verdict) for entry, verdict in await unknown_verdicts(redis, RunKeys(run), after)]


async def last_views(redis: Redis, keys: RunKeys, count: int) -> list[UnknownView]:
    """The last `count` unknown verdicts that were noted, oldest first."""
    return [_view(entry, verdict) for entry, verdict in await last_unknown(redis, keys, count)]


def _view(entry: str, verdict: UnknownVerdict) -> UnknownView:
    return UnknownView(
        entry=entry,
        at=verdict.at,
        lane=verdict.lane,
        prompt=verdict.prompt and verdict.prompt[:EXCERPT],
        group=verdict.group[:EXCERPT],
        index=verdict.index,
        reason=verdict.reason[:EXCERPT],
        excerpt=verdict.excerpt[:EXCERPT],
    )
