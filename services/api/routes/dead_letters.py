"""Owns the REST route of a run's dead letters.

Must not trust a letter: its content may be hostile.
"""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Query

from services.api.dependencies import PlatformOf, ViewedRun
from services.api.views.faults import DeadView
from services.contracts import DeadLetter
from services.streams.keys import RunKeys
from services.streams.state.events import letters

ENTRY = r"^[0-9]{1,19}-[0-9]{1,19}$"
EXCERPT = 500
"""Characters shown of fields whose length a message chooses."""


router = APIRouter(prefix="/v1/runs", tags=["faults"])


@router.get("/{run}/dead")
async def list_dead_letters(
    platform: PlatformOf, record: ViewedRun, after: Annotated[str, Query(pattern=ENTRY)] = "0-0"
) -> list[DeadView]:
    """Up to 200 dead letters after the one whose entry is `after`, oldest first."""
    return [_view(entry, letter) for entry, letter in await letters(platform.redis, RunKeys(record.id), after)]


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
