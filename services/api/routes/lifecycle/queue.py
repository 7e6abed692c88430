"""Owns the REST route of the queue.

Must not place a run; the controller does.
"""

from __future__ import annotations

from fastapi import APIRouter

from services.api.dependencies import PlatformOf, Viewer
from services.api.views.queue import QueuedView, QueueView
from services.streams.runs.queue import read_queue

router = APIRouter(prefix="/v1/queue", tags=["runs"])


@router.get("")
async def show_queue(platform: PlatformOf, principal: Viewer) -> QueueView:
    """The runs that wait to be placed: by priority, then by age. A position counts runs that you cannot see."""
    found = await read_queue(platform.redis)
    shown = [
        QueuedView(
            id=queued.record.id,
            project=queued.record.project,
            position=queued.position,
            priority=queued.record.priority,
            since=queued.record.history[-1].at,
            waits_for=queued.waits_for,
        )
        for queued in found
        if principal.role_in(queued.record.project)
    ]
    return QueueView(runs=shown, length=len(found))
