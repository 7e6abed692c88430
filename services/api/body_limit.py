"""Owns the limit on the size of a request's body, which holds before any of it is parsed.

Must not read a body itself: a route that takes none leaves it unread.
"""

from __future__ import annotations

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.settings.faults import invalid
from services.settings.rewards.files import MOST_BYTES_TOGETHER

MOST_BODY = 8 * MOST_BYTES_TOGETHER
"""Bytes. JSON needs up to six for one of a file (a control character is `\\u0001`); the rest is for the recipe."""
TOO_LARGE = 413


class BodyLimit:
    """Refuses a body above MOST_BODY: at once if its length is announced, else as soon as more has been received."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        announced = _announced(scope)
        if announced > MOST_BODY:
            await JSONResponse({"detail": _fault(announced)}, TOO_LARGE)(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BODY:
                raise HTTPException(TOO_LARGE, _fault(received))
            return message

        await self._app(scope, limited, send)


def _announced(scope: Scope) -> int:
    """The length that a request states for its body; 0 if it states none, or no number, which the server refuses."""
    stated = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
    return int(stated) if stated.isdecimal() else 0


def _fault(size: int) -> str:
    return invalid("body", size, f"at most {MOST_BODY} bytes")
