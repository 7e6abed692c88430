"""Owns an open stream of a run: what was written before it was opened, then what is written, until the run has ended.

Must not read Redis for what other streams of the run read too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from fastapi.sse import KEEPALIVE_COMMENT

from services.api.streams.hub import DroppedError, Ended, Hub, StreamItem, Subscription
from services.api.streams.run_events import StoryCursor, StoryPage, Storyteller, positions_of, read_story
from services.api.streams.sending import HEARTBEAT_S, first_frame, frame
from services.streams.connection.client import Redis, RedisUnavailableError
from services.streams.keys import RunKeys

log = logging.getLogger(__name__)

PAGE = 500
SHARED = 256
"""Items that are kept as they were sent; some KiB each."""


@dataclass(frozen=True)
class RunFollower:
    """Makes the bytes of one stream. `allowed`: whether its reader may still read the run."""

    redis: Redis
    hub: Hub
    keys: RunKeys
    allowed: Callable[[], Awaitable[bool]]

    async def frames(self, page: StoryPage) -> AsyncIterator[bytes]:
        """The stream from its first page on, which was read before the response started."""
        yield first_frame()
        try:
            while page.more:
                yield _frames(page)
                page = await read_story(self.redis, self.keys, page.next, PAGE)
            yield _frames(page)
            if page.ended:
                yield _last(page.ended)
                return
            subscription = self.hub.subscribe(self.keys.run, positions_of(self.keys, page.next), page.next.states)
            try:
                async for chunk in self._live(subscription, page.next):
                    yield chunk
            finally:
                self.hub.leave(subscription)
        except RedisUnavailableError as error:
            log.warning("a stream of run %s ends, and its client connects again: %s", self.keys.run, error)

    async def _live(self, subscription: Subscription, cursor: StoryCursor) -> AsyncIterator[bytes]:
        more = True
        while more:  # what was written between the last page and the subscription
            page = await read_story(self.redis, self.keys, cursor, PAGE)
            cursor, more = page.next, page.more
            yield _frames(page)
        while True:
            try:
                items = await subscription.take(HEARTBEAT_S)
            except Ended as end:
                yield _last(str(end))
                return
            except DroppedError:
                return
            if not await self.allowed():
                return
            if not items:
                yield KEEPALIVE_COMMENT
            chunk = bytearray()
            for item in items:
                cursor, told = _told(self.keys.run, cursor, item)
                chunk += told
            yield bytes(chunk)


@lru_cache(maxsize=SHARED)
def _told(run: str, cursor: StoryCursor, item: StreamItem) -> tuple[StoryCursor, bytes]:
    """The cursor behind an item, and the item as it is sent to a reader at `cursor`; b"" if its reader knows it.

    Most readers of a run are at the same place, so an item is read and written once for all of them.
    """
    teller = Storyteller(RunKeys(run))
    kind = teller.kind(item)
    if cursor.knows(kind, item.entry):
        return cursor, b""
    cursor = cursor.behind(kind, item.entry)
    story = teller.report(item)
    return cursor, frame(story.json(cursor), kind, str(cursor)) if story else b""


def _frames(page: StoryPage) -> bytes:
    return b"".join(frame(story.json(cursor), story.kind, str(cursor)) for cursor, story in page.told)


def _last(why: str) -> bytes:
    """Clients close the stream when they receive it, instead of connecting again."""
    return frame(json.dumps({"reason": why}).encode(), "end")
