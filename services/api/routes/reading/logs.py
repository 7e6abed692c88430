"""Owns the REST routes of a run's logs: which processes have one, and its last lines as a page or a stream.

Must not trust a line: it may be what a model wrote.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT

from services.api.dependencies import PlatformOf, ViewedRun, still_views
from services.api.routes.reading.events import AS_STREAM, STREAM
from services.api.routes.reading.stored_files import MissingFileError
from services.api.streams.hub import DroppedError, Ended, Hub
from services.api.streams.open_streams import StreamsOf
from services.api.streams.sending import HEARTBEAT_S, EventStream, first_frame, frame
from services.api.views.reading.logs import LogLineView, LogList, LogPage, LogSourceView
from services.contracts import ProcessInfo
from services.streams.connection.client import Redis, RedisUnavailableError
from services.streams.delivery.following import Entries, read_pages
from services.streams.delivery.process_logs import LINES_KEPT, log_sources, read_line
from services.streams.keys import RunKeys
from services.streams.state.heartbeat import live_processes

log = logging.getLogger(__name__)

ENTRY = r"^[0-9]{1,15}-[0-9]{1,15}$"
FIRST = "0-0"
LINE = "line"

router = APIRouter(prefix="/v1/runs", tags=["logs"])


@router.get("/{run}/logs")
async def list_logs(platform: PlatformOf, record: ViewedRun) -> LogList:
    """The processes of the run that have a log; also those that have ended, for a week."""
    processes: list[ProcessInfo] = await live_processes(platform.redis, record.id)
    live = {process.id for process in processes}
    found = await log_sources(platform.redis, RunKeys(record.id))
    return LogList(processes=[LogSourceView(**dict(source), live=source.process in live) for source in found])


@router.get("/{run}/logs/{process}", response_model=LogPage, responses={200: {"content": {STREAM: AS_STREAM}}})
async def show_log(
    request: Request,
    platform: PlatformOf,
    record: ViewedRun,
    streams: StreamsOf,
    process: str,
    after: Annotated[str, Query(pattern=ENTRY)] = FIRST,
    limit: Annotated[int, Query(ge=1, le=LINES_KEPT)] = LINES_KEPT,
    last_event_id: Annotated[str | None, Header(pattern=ENTRY)] = None,
) -> Response:
    """The last lines of a process's log, oldest first, without secrets.

    A page; or with `Accept: text/event-stream` a stream that follows the log until the run has ended.
    """
    redis, keys = platform.redis, RunKeys(record.id)
    if not await redis.hexists(keys.logs, process.encode("utf-8", "replace")):
        raise MissingFileError(f"process {process[:200]!r} of run {record.id!r} has no log")
    log = keys.log(process)
    if STREAM not in request.headers.get("accept", ""):
        entries = (await read_pages(redis, {log: after}, limit))[log]
        last = entries[-1][0] if entries else after
        page = LogPage(lines=lines_of(entries), next=last, more=len(entries) == limit)
        return Response(page.model_dump_json(), media_type="application/json")
    start = last_event_id or after
    follower = LogFollower(redis, streams.hub, record.id, log, start, still_views(request, platform, record.project))
    return EventStream(streams.slots, follower.frames, f"the log of {process[:100]}")


def lines_of(entries: Entries) -> list[LogLineView]:
    """The lines in entries of a log."""
    found = [(entry, read_line(body)) for entry, body in entries]
    return [LogLineView(id=entry, **dict(line)) for entry, line in found if line]


@dataclass(frozen=True)
class LogFollower:
    """Makes the bytes of one stream of a log. `allowed`: whether its reader may still read the run."""

    redis: Redis
    hub: Hub
    run: str
    log: str
    after: str
    allowed: Callable[[], Awaitable[bool]]

    async def frames(self) -> AsyncIterator[bytes]:
        """The lines that are there, then those that follow."""
        yield first_frame()
        subscription = self.hub.subscribe(self.run, {self.log: self.after}, 0)
        try:
            entries = (await read_pages(self.redis, {self.log: self.after}, LINES_KEPT))[self.log]
            last = entries[-1][0] if entries else self.after
            yield _frames(entries)
            while True:
                items = await subscription.take(HEARTBEAT_S)
                new = [(item.entry, item.body) for item in items if item.stream and _order(item.entry) > _order(last)]
                last = new[-1][0] if new else last
                if not await self.allowed():
                    return
                yield _frames(new) if items else KEEPALIVE_COMMENT
        except Ended as end:
            yield frame(json.dumps({"reason": str(end)}).encode(), "end")
        except DroppedError:
            return
        except RedisUnavailableError as error:
            log.warning("the log of a process of run %s ends, and its client connects again: %s", self.run, error)
        finally:
            self.hub.leave(subscription)


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _frames(entries: Entries) -> bytes:
    return b"".join(frame(line.model_dump_json().encode(), LINE, line.id) for line in lines_of(entries))
