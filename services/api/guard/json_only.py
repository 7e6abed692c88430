"""Owns the refusal of bodies that are not JSON (415), or that have too many values (422), of routes that take one.

Must not know what a value means.
"""

from __future__ import annotations

from email.message import Message
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from services.settings.faults import invalid

UNSUPPORTED, TOO_MUCH = 415, 422
EXPECTED = "application/json"
MOST_VALUES = 20_000
"""Of one body; recipes have some hundred. Each value may be a fault, and to explain a million of them stops the loop,
and on a laptop the controller with it, for many seconds."""


async def json_only(request: Request) -> None:
    """A dependency: a body that is announced is JSON. A form that a foreign page submits is none."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None or not _has_body(request):
        return
    stated = request.headers.get("content-type", "")
    if not _is_json(stated):
        raise HTTPException(UNSUPPORTED, invalid("content-type", stated, EXPECTED))


async def few_values(request: Request) -> None:
    """A dependency: a body has at most MOST_VALUES values. It comes before the body is validated."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None or not await request.body():
        return
    # It is parsed already: FastAPI does so before any dependency, and the request keeps it.
    if _exceeds(await request.json(), MOST_VALUES):
        fault = f"body: more than {MOST_VALUES} values is not valid: expected at most {MOST_VALUES}"
        raise HTTPException(TOO_MUCH, fault)


def _exceeds(document: Any, most: int) -> bool:
    """Whether a document of JSON has more than `most` values."""
    unseen = [document]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict | list):
            most -= len(value)
            if most < 0:
                return True
            unseen.extend(value.values() if isinstance(value, dict) else value)
    return False


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _is_json(content_type: str) -> bool:
    """As FastAPI judges it: also `application/problem+json` and other JSON."""
    message = Message()
    message["content-type"] = content_type or "none/none"
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
