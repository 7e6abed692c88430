"""Owns the limits on a request's body, its size and its duration, which hold before any of it is parsed.

Must not read a body itself: a route that takes none leaves it unread.
"""

from __future__ import annotations

import asyncio

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.answers.problems import refusal
from services.settings.faults import invalid
from services.settings.rewards.files import MOST_BYTES_TOGETHER

MOST_PLAIN = 2**20
"""Bytes of a body without files."""
MOST_BODY = 8 * MOST_BYTES_TOGETHER
"""Bytes. JSON needs up to six for one of a file (a control character is `\\u0001`); the rest is for the recipe."""
UPLOADS = frozenset({("POST", "/v1/runs")})
"""Routes that take files."""
TOO_LARGE = 413
TOO_SLOW = 408
BODY_S = 60.0
"""From the end of the headers to the end of the body."""


class BodyLimit:
    """Refuses a body that is too long, at once if its length is announced, or that takes longer than `seconds`."""

    def __init__(self, app: ASGIApp, seconds: float = BODY_S) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = MOST_BODY if (scope["method"], scope["path"]) in UPLOADS else MOST_PLAIN
        announced = _announced(scope)
        if announced > most:
            await refusal(scope, TOO_LARGE, _fault(announced, most))(scope, receive, send)
            return
        received, whole = 0, False
        ends = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal received, whole
            if whole:  # what follows is the client's disconnection, whenever that is
                return await receive()
            try:
                async with asyncio.timeout_at(ends):
                    message = await receive()
            except TimeoutError:
                fault = f"body: {received} bytes came in {self._seconds:g} s: expected the whole body"
                raise HTTPException(TOO_SLOW, fault) from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > most:
                raise HTTPException(TOO_LARGE, _fault(received, most))
            return message

        await self._app(scope, limited, send)


def _announced(scope: Scope) -> int:
    """The length that a request states for its body; 0 if it states none, or no number, which the server refuses."""
    stated = Headers(scope=scope).get("content-length", "")
    return int(stated) if stated.isdecimal() and len(stated) < 20 else 0


def _fault(size: int, most: int) -> str:
    return invalid("body", size, f"at most {most} bytes")
