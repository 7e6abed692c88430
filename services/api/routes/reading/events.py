"""Owns the REST route of a run's story: a page of it, or a stream that follows it.

Must not trust an event's text; it may come from a model.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from services.api.dependencies import PlatformOf, ViewedRun, still_views
from services.api.streams.following import PAGE, RunFollower
from services.api.streams.open_streams import StreamsOf
from services.api.streams.run_events import CURSOR, START, StoryPage, parse_cursor, read_story
from services.api.streams.sending import EventStream
from services.api.views.reading.events import EventPage
from services.streams.keys import RunKeys

STREAM = "text/event-stream"
AS_STREAM = {
    "schema": {"type": "string", "description": "Events named by `kind`, with an item of the page as data; then `end`."}
}

router = APIRouter(prefix="/v1/runs", tags=["events"])


@router.get("/{run}/events", response_model=EventPage, responses={200: {"content": {STREAM: AS_STREAM}}})
async def list_events(
    request: Request,
    platform: PlatformOf,
    record: ViewedRun,
    streams: StreamsOf,
    after: Annotated[str, Query(pattern=CURSOR)] = START,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
    last_event_id: Annotated[str | None, Header(pattern=CURSOR)] = None,
) -> Response:
    """What happened in the run: events, changes of state, rollout steps with metrics, evaluations; oldest first.

    A page; or with `Accept: text/event-stream` a stream of server-sent events, which first sends what is behind the
    cursor, then follows the run, and ends with the event `end` when the run has ended and all was sent.
    """
    keys, wants_stream = RunKeys(record.id), STREAM in request.headers.get("accept", "")
    field = "last-event-id" if last_event_id else "after"
    cursor = await parse_cursor(platform.redis, keys, last_event_id or after, field)
    page = await read_story(platform.redis, keys, cursor, PAGE if wants_stream else limit)
    if not wants_stream:
        return Response(_encoded(page), media_type="application/json")
    follower = RunFollower(platform.redis, streams.hub, keys, still_views(request, platform, record.project))
    return EventStream(streams.slots, lambda: follower.frames(page), f"a stream of run {record.id}")


def _encoded(page: StoryPage) -> bytes:
    told = b",".join(story.json(cursor) for cursor, story in page.told)
    more, ended = (b"true" if value else b"false" for value in (page.more, page.ended))
    return b'{"events":[%s],"next":"%s","more":%s,"ended":%s}' % (told, str(page.next).encode(), more, ended)
