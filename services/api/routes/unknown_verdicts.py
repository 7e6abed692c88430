"""Owns the REST route of a run's unknown verdicts.

Must not trust one: its texts come from models and rewards.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from services.api.dependencies import PlatformOf, ViewedRun
from services.api.routes.dead_letters import ENTRY, EXCERPT
from services.api.views.faults import UnknownView
from services.contracts import UnknownVerdict
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.rewards.unknown import last_unknown, unknown_verdicts

router = APIRouter(prefix="/v1/runs", tags=["faults"])


@router.get("/{run}/unknown")
async def list_unknown_verdicts(
    platform: PlatformOf, record: ViewedRun, after: Annotated[str, Query(pattern=ENTRY)] = "0-0"
) -> list[UnknownView]:
    """Up to 200 of the last unknown verdicts after the one whose entry is `after`, oldest first."""
    found = await unknown_verdicts(platform.redis, RunKeys(record.id), after)
    return [_view(entry, verdict) for entry, verdict in found]


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
