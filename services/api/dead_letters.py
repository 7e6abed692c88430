"""Owns the REST routes of dead letters: list them, redrive one, redrive all.

Must not decide what can be redriven; services.streams.state.dead_letters does.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI, Path, Query

from services.api.views import DeadView, RedriveView
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.dead_letters import Letter, get_letter, letters, redrive, redrive_all
from services.streams.state.events import EventLog
from services.streams.state.runs import EndedRunError, RunRecords

ENTRY = r"^\d{1,19}-\d{1,19}$"
EXCERPT = 500
"""Characters shown of fields whose length a message chooses."""


def add_dead_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    """Add the routes under /v1/runs/{run}/dead."""

    async def event_log_of(run: str) -> EventLog:
        record = await records.get(run)
        if record.state.ended:
            hint = "" if record.state.value == "succeeded" else "; resume it first"
            raise EndedRunError(f"run {run!r} has ended: it is {record.state.value}{hint}")
        return EventLog(redis, RunKeys(run), "api")

    @app.get("/v1/runs/{run}/dead")
    async def dead(run: str, after: Annotated[str, Query(pattern=ENTRY)] = "0-0") -> list[DeadView]:
        """Up to 200 dead letters after the one whose entry is `after`, oldest first."""
        await records.get(run)
        return [_view(dead_letter) for dead_letter in await letters(redis, RunKeys(run), after)]

    @app.post("/v1/runs/{run}/dead/redrive")
    async def redrive_every(run: str) -> list[RedriveView]:
        """Requeue the groups of all dead letters where possible; one result per letter not redriven before."""
        event_log = await event_log_of(run)
        return [RedriveView(**asdict(result)) for result in await redrive_all(redis, RunKeys(run), event_log)]

    @app.post("/v1/runs/{run}/dead/{entry}/redrive")
    async def redrive_one(run: str, entry: Annotated[str, Path(pattern=ENTRY)]) -> RedriveView:
        """Requeue a dead letter's group, once and under a new name; the dead group stays dead."""
        event_log, keys = await event_log_of(run), RunKeys(run)
        dead_letter = await get_letter(redis, keys, entry)
        return RedriveView(**asdict(await redrive(redis, keys, dead_letter, event_log)))


def _view(stored: Letter) -> DeadView:
    letter = stored.letter
    known = letter.at if 0 < letter.at < math.inf else int(stored.entry.split("-")[0]) / 1000
    return DeadView(
        entry=stored.entry,
        at=known,
        stream=letter.stream[:EXCERPT],
        cause=letter.cause,
        reason=letter.reason[:EXCERPT],
        deliveries=letter.deliveries,
        group=letter.group and letter.group[:EXCERPT],
        prompt=letter.prompt and letter.prompt[:EXCERPT],
        size=letter.size,
        excerpt=letter.body[:EXCERPT],
        redriven=stored.redriven,
    )
