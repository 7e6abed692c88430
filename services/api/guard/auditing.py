"""Owns the audit of requests: every change is noted before a route makes it, and denied requests are logged too.

Must not log a token, a password or the text of a file; nor let a change happen that cannot be noted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.access.notes import NOTES
from services.api.access.roles import Access, AccessUnavailableError
from services.api.access.settings import AuditSettings
from services.api.answers.problems import refusal, request_id_of
from services.api.guard.origins import SAFE
from services.api.guard.rates import ALL_DENIALS, DENIALS, Rates, network_of
from services.api.guard.sign_in import address_of, is_closed
from services.streams.access.audit import AuditEntry, AuditLog, ChangeOutcome
from services.streams.connection.client import RedisUnavailableError
from services.streams.connection.functions import RedisFullError

log = logging.getLogger(__name__)

UNABLE = (RedisUnavailableError, RedisFullError, TimeoutError)
WRITE_S = 4.0
"""For one write of the log; clients wait little longer for a response."""
LATE_WRITE_S = 0.5
"""For the outcome of a request that has taken as long already: a Redis that hangs delays no response beyond 5 s."""
DENIED = frozenset({400, 401, 403, 421, 429})
"""What guards answer; a route's own 403 follows a note already."""
MOST_KEPT = 64 * 1024
"""Bytes of a body from which changed values are taken."""
VALUES, VALUE_CHARACTERS, PATH_CHARACTERS = 50, 200, 300
SECRET = re.compile(r"token|secret|password|credential|authorization|api_?key", re.IGNORECASE)
OMITTED = "omitted"


class AuditDenials:
    """Logs denied requests, as many of an address and in all as DENIALS and ALL_DENIALS allow."""

    def __init__(self, app: ASGIApp, audit: AuditLog, access: Access, rates: Rates) -> None:
        self._app = app
        self._audit = audit
        self._access = access
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http" or not is_closed(scope["path"]):
            await self._app(scope, receive, send)
            return
        status = 0

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, seen)
        if status in DENIED and not scope.get("state", {}).get("audited"):
            await self._log(scope, status)

    async def _log(self, scope: Scope, status: int) -> None:
        rates, address = self._rates, network_of(address_of(scope))
        if await rates.wait_s(DENIALS, "denied", address) or await rates.wait_s(ALL_DENIALS, "denied"):
            return
        entry = _entry(scope).model_copy(update={"outcome": ChangeOutcome.REFUSED, "status": status})
        try:
            kept = _retention(self._access)
            async with asyncio.timeout(WRITE_S):
                await self._audit.begin(entry)
                await self._audit.end(entry, kept.entries, kept.days)
        except UNABLE as error:
            log.warning("request %s was denied (%d), which the audit log lacks: %r", entry.request, status, error)


class AuditChanges:
    """Notes every change before a route sees it, and its outcome before the client does.

    Without Redis nothing can be noted, and nothing is changed: 503. If the outcome cannot be written, the note stays,
    and becomes an entry with the outcome `unknown`.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog, access: Access) -> None:
        self._app = app
        self._audit = audit
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http" or scope["method"] in SAFE or not is_closed(scope["path"]):
            await self._app(scope, receive, send)
            return
        entry, ends = _entry(scope), asyncio.get_running_loop().time() + WRITE_S
        try:
            async with asyncio.timeout_at(ends):
                await self._audit.begin(entry)
        except UNABLE as error:
            why = str(error) or f"Redis did not answer within {WRITE_S:g} s"
            await refusal(scope, 503, f"nothing was changed: the audit log cannot note it: {why}")(scope, receive, send)
            return
        scope["state"]["audited"] = True
        notes: dict[str, str] = {}
        body, done = bytearray(), False
        token = NOTES.set(notes)

        async def copied() -> Message:
            message = await receive()
            if len(body) <= MOST_KEPT:
                body.extend(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            nonlocal done
            if message["type"] == "http.response.start" and not done:
                done = True
                await self._end(_finished(entry, scope, notes, bytes(body), message["status"]), ends)
            await send(message)

        try:
            await self._app(scope, copied, noted)
        except Exception:
            if not done:
                await self._end(_finished(entry, scope, notes, bytes(body), 500), ends)
            raise
        finally:
            NOTES.reset(token)

    async def _end(self, entry: AuditEntry, ends: float) -> None:
        kept = _retention(self._access)
        try:
            async with asyncio.timeout_at(max(ends, asyncio.get_running_loop().time() + LATE_WRITE_S)):
                await self._audit.end(entry, kept.entries, kept.days)
        except UNABLE as error:
            log.warning("the outcome of request %s (%s) is only noted as pending: %r", entry.request, entry.path, error)


def _retention(access: Access) -> AuditSettings:
    try:
        return access.settings().audit
    except AccessUnavailableError:
        return AuditSettings()


def _entry(scope: Scope) -> AuditEntry:
    principal = scope.get("state", {}).get("principal")
    return AuditEntry(
        at=time.time(),
        request=request_id_of(scope),
        principal=principal.name if principal else "",
        address=address_of(scope),
        method=scope["method"][:16],
        path=_plain(scope["path"][:PATH_CHARACTERS]),
    )


def _finished(entry: AuditEntry, scope: Scope, notes: dict[str, str], body: bytes, status: int) -> AuditEntry:
    outcome = ChangeOutcome.DONE if status < 400 else ChangeOutcome.REFUSED if status < 500 else ChangeOutcome.FAILED
    return entry.model_copy(
        update={
            "outcome": outcome,
            "status": status,
            "route": str(getattr(scope.get("route"), "path", "")),
            "run": _plain(notes.get("run") or str(scope.get("path_params", {}).get("run", "")))[:PATH_CHARACTERS],
            "project": _plain(notes.get("project", ""))[:PATH_CHARACTERS],
            "changes": stated_values(scope.get("query_string", b""), body),
        }
    )


def stated_values(query: bytes, body: bytes) -> dict[str, Any]:
    """The values that a request states, by dotted name: scalars, cut; of files and recipes only names."""
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query.decode("latin-1")[:MOST_KEPT], max_num_fields=None):
        _take(found, name, value)
    if not body:
        return found
    if len(body) > MOST_KEPT:
        return {**found, "body": f"more than {MOST_KEPT} bytes"}
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {**found, "body": "no JSON"}
    for name, value in document.items() if isinstance(document, dict) else ():
        _take(found, str(name), value)
    return found


def _take(found: dict[str, Any], name: str, value: Any) -> None:
    if len(found) >= VALUES:
        return
    name = _plain(name[:VALUE_CHARACTERS])
    if SECRET.search(name):
        found[name] = OMITTED
    elif name == "recipe" and isinstance(value, dict):
        found["recipe.name"] = _plain(str(value.get("name", ""))[:VALUE_CHARACTERS])
    elif name == "files" and isinstance(value, dict):
        found["files"] = [_plain(str(file)[:VALUE_CHARACTERS]) for file in list(value)[:VALUES]]
    elif isinstance(value, dict):
        for inner, scalar in list(value.items())[:VALUES]:
            _take_scalar(found, f"{name}.{inner}", scalar)
    else:
        _take_scalar(found, name, value)


def _take_scalar(found: dict[str, Any], name: str, value: Any) -> None:
    name = _plain(name[:VALUE_CHARACTERS])
    if SECRET.search(name):
        found[name] = OMITTED
    elif value is None or isinstance(value, bool):
        found[name] = value
    elif isinstance(value, (int, float)):
        found[name] = value if abs(value) < 2**53 else OMITTED
    else:
        found[name] = _plain(str(value)[:VALUE_CHARACTERS])


def _plain(text: str) -> str:
    """The text without lone surrogates, which JSON in Redis cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()
