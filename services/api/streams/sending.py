"""Owns how an open stream is sent: the wire format, heartbeats, the most streams at once, and clients that do not read.

Must not know what is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from services.api.answers.problems import refusal
from services.settings.faults import invalid

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""After this long without an item a comment is sent, so that proxies keep the connection and dead clients are found."""
SEND_S = 30.0
"""How long a client may take to accept what is sent."""
RETRY_MS = 2000
"""After which a browser connects again."""
STREAMS = "PENSTOCK_STREAMS"
MOST_STREAMS = 2000
"""By default, of one gateway. One takes about 40 KiB (benchmarks/api/streams.py)."""
AGAIN_S = 5
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""The second one: nginx must not hold back what is sent."""
BOUNDARIES = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Line boundaries of Unicode that JSON has as they are, and what it may have instead."""


def most_streams() -> int:
    """How many streams one gateway holds open. Raises ValueError for a setting that is not valid."""
    given = os.environ.get(STREAMS, str(MOST_STREAMS))
    if not (given.isascii() and given.isdigit() and len(given) < 7):
        raise ValueError(invalid(STREAMS, given, "the most streams that one gateway holds open, 0 to 999999"))
    return int(given)


@dataclass
class Slots:
    """How many streams are open, of how many."""

    most: int
    open: int = 0


def frame(data: bytes, event: str, cursor: str = "") -> bytes:
    """One server-sent event. `data`: JSON in one line.

    FastAPI's own function, and some clients, split at every line boundary of Unicode, so those in strings are escaped.
    """
    known = f"id: {cursor}\n" if cursor else ""
    for boundary, escaped in BOUNDARIES.items():
        data = data.replace(boundary, escaped)
    return b"event: %s\n%sdata: %s\n\n" % (event.encode(), known.encode(), data)


def first_frame() -> bytes:
    """What a stream starts with, so that its client sees it is open."""
    return format_sse_event(retry=RETRY_MS, comment="open")


class EventStream(EventSourceResponse):
    """An open stream, or 503 if there are too many. `make` gives its bytes; it is closed however the stream ends."""

    def __init__(self, slots: Slots, make: Callable[[], AsyncIterator[bytes]], name: str) -> None:
        super().__init__(make(), headers=HEADERS)
        self._slots = slots
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or its client leaves (the interface of ASGI applications)."""
        if self._slots.open >= self._slots.most:
            text = f"all {self._slots.most} streams of this gateway ({STREAMS}) are open: expected fewer"
            await refusal(scope, 503, text, {"retry-after": str(AGAIN_S)})(scope, receive, send)
            return
        self._slots.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.open -= 1

    async def stream_response(self, send: Send) -> None:
        """As Starlette's, but a client that accepts nothing for SEND_S seconds is left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.body_iterator) as chunks:  # type: ignore[type-var]  # an asynchronous generator
            async for chunk in chunks:
                try:
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    log.warning("%s was dropped: its client has read nothing for %g s", self._name, SEND_S)
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
