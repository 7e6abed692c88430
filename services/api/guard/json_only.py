"""Owns the refusal of bodies that are not JSON (415), of those routes that take one.

Must not read a body.
"""

from __future__ import annotations

from email.message import Message

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from services.settings.faults import invalid

UNSUPPORTED = 415
EXPECTED = "application/json"


async def json_only(request: Request) -> None:
    """A dependency: a body that is announced is JSON. A form that a foreign page submits is none."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None or not _has_body(request):
        return
    stated = request.headers.get("content-type", "")
    if not _is_json(stated):
        raise HTTPException(UNSUPPORTED, invalid("content-type", stated, EXPECTED))


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _is_json(content_type: str) -> bool:
    """As FastAPI judges it: also `application/problem+json` and other JSON."""
    message = Message()
    message["content-type"] = content_type or "none/none"
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
