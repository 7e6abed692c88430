"""Owns the REST routes of dead letters: look at them, redrive one, redrive all.

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
"""Characters that are shown of anything that a message may make as long as it likes."""


def add_dead_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    """Add the routes under /v1/runs/{run}/dead."""

    async def journal_of(run: str) -> EventLog:
        record = await records.get(run)
        if record.state.ended:
            hint = "" if record.state.value == "succeeded" else "; resume it first"
            raise EndedRunError(f"run {run!r} has ended: it is {record.state.value}{hint}")
        return EventLog(redis, RunKeys(run), "api")

    @app.get("/v1/runs/{run}/dead")
    async def dead(run: str, after: Annotated[str, Query(pattern=ENTRY)] = "0-0") -> list[DeadView]:
        """Up to 200 messages that were given up, behind the one whose entry is `after`, oldest first."""
        await records.get(run)
        return [_view(one) for one in await letters(redis, RunKeys(run), after)]

    @app.post("/v1/runs/{run}/dead/redrive")
    async def redrive_every(run: str) -> list[RedriveView]:
        """Draw the groups of all letters again that can be; what came of each letter not redriven before."""
        event_log = await journal_of(run)
        return [RedriveView(**asdict(one)) for one in await redrive_all(redis, RunKeys(run), event_log)]

    @app.post("/v1/runs/{run}/dead/{entry}/redrive")
    async def redrive_one(run: str, entry: Annotated[str, Path(pattern=ENTRY)]) -> RedriveView:
        """Draw a letter's group again, once and under a name of its own; the dead one stays dead."""
        event_log, keys = await journal_of(run), RunKeys(run)
        one = await get_letter(redis, keys, entry)
        return RedriveView(**asdict(await redrive(redis, keys, one, event_log)))


def _view(one: Letter) -> DeadView:
    letter = one.letter
    known = letter.at if 0 < letter.at < math.inf else int(one.entry.split("-")[0]) / 1000
    return DeadView(
        entry=one.entry, at=known, stream=letter.stream[:EXCERPT], cause=letter.cause, reason=letter.reason[:EXCERPT],
        deliveries=letter.deliveries, group=letter.group and letter.group[:EXCERPT], size=letter.size,
        prompt=letter.prompt and letter.prompt[:EXCERPT], excerpt=letter.body[:EXCERPT], redriven=one.redriven,
    )  # fmt: skip
