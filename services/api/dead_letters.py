"""Owns the REST route of a run's dead letters.

Must not trust a letter: its content may be hostile.
"""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import FastAPI, Query

from services.api.views import DeadView
from services.contracts import DeadLetter
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.events import letters
from services.streams.state.runs import RunRecords

ENTRY = r"^\d{1,19}-\d{1,19}$"
EXCERPT = 500
"""Characters shown of fields whose length a message chooses."""


def add_dead_route(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    """Add the route /v1/runs/{run}/dead."""

    @app.get("/v1/runs/{run}/dead")
    async def dead(run: str, after: Annotated[str, Query(pattern=ENTRY)] = "0-0") -> list[DeadView]:
        """Up to 200 dead letters after the one whose entry is `after`, oldest first."""
        await records.get(run)
        return [_view(entry, letter) for entry, letter in await letters(redis, RunKeys(run), after)]


def _view(entry: str, letter: DeadLetter) -> DeadView:
    known = letter.at if 0 < letter.at < math.inf else int(entry.split("-")[0]) / 1000
    return DeadView(
        entry=entry,
        at=known,
        stream=letter.stream[:EXCERPT],
        cause=letter.cause,
        reason=letter.reason[:EXCERPT],
        deliveries=letter.deliveries,
        group=letter.group and letter.group[:EXCERPT],
        prompt=letter.prompt and letter.prompt[:EXCERPT],
        size=letter.size,
        excerpt=letter.body[:EXCERPT],
    )
