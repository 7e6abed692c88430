"""Owns the limits of a connection: on its headers, on how long it may be silent, and on how many there are.

Must not know what is asked. uvicorn's own limit on concurrency counts idle connections too, so that a client
with enough of them would stop all others; here the one that has been idle for longest ends instead.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_BYTES = 32 * 1024
"""Of a request's line and headers together."""
HEADERS_S = 10.0
"""From a connection's start, or a request's first byte, to the end of its headers."""
IDLE_S = 15.0
"""Between two requests; longer than clients keep a connection that they may use again (httpx: 5 s)."""
UNREAD_S = 5.0
"""For the rest of a body after the response, which a client may still be sending while it reads why it was refused."""
STUCK_S = 60.0
"""How long a client may read nothing of a response."""
MOST_CONNECTIONS = 4096
RESERVED_FILES = 256
"""Of the process's limit on open files: Redis, Ray, libraries."""


def most_connections() -> int:
    """How many connections this process can hold; raises its limit on open files to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    known = MOST_CONNECTIONS + RESERVED_FILES if most == resource.RLIM_INFINITY else most
    return max(64, min(MOST_CONNECTIONS, known - RESERVED_FILES))


class GuardedConnection(H11Protocol):
    """One connection. `most`, `headers_s`: set by `guarded`."""

    most = MOST_CONNECTIONS
    headers_s = HEADERS_S
    stuck_s = STUCK_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        """Start the deadline for the first request's headers."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._end_idle()
        self._arm(self.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._disarm()
        self._cancel_stuck()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on data; the deadline holds until the headers are complete, however slowly they come."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if self.cycle is None or not self.cycle.response_complete:
                self._disarm()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._arm(self.headers_s)

    def on_response_complete(self) -> None:
        """What the client still sends of a body that is not read must end soon."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._arm(UNREAD_S)

    def pause_writing(self) -> None:
        """The client reads too slowly, or nothing."""
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(self.stuck_s, self._end, "reads nothing of its response")

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._cancel_stuck()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._end, f"was silent or slow for {seconds:g} s")

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _end_idle(self) -> None:
        """End the connection that waits for its headers for longest, so that this one has room."""
        others = [other for other in self.connections if isinstance(other, GuardedConnection) and other is not self]
        idle = [other for other in others if other.is_idle]
        oldest = min(idle, key=lambda other: other.ends_at, default=None)
        if oldest is None:
            self._end("has no room: all others are being served")
        else:
            oldest._end("made room for another one")

    @property
    def ends_at(self) -> float:
        """When this idle connection will end by itself (the loop's seconds)."""
        timers = [timer.when() for timer in (self._deadline, self.timeout_keep_alive_task) if timer is not None]
        return min(timers, default=0.0)

    def _end(self, why: str) -> None:
        log.debug("a connection of %s %s", self.client, why)
        self.transport.abort()


def guarded(headers_s: float = HEADERS_S, stuck_s: float = STUCK_S) -> type[GuardedConnection]:
    """The class of a server's connections, with these deadlines in seconds."""
    limits = {"most": most_connections(), "headers_s": headers_s, "stuck_s": stuck_s}
    return type("GuardedConnection", (GuardedConnection,), limits)
