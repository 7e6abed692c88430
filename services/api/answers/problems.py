"""Owns how errors are answered: RFC 9457 problem details, each with the id of its request.

Must not show the content of an unexpected exception, nor more than VALUE_CHARACTERS of a value.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_problem.error import Problem, StatusProblem
from fastapi_problem.handler import ExceptionHandler, new_exception_handler
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.settings.faults import explained, shown

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPES = "urn:penstock:problem:{type}"
"""A problem's type, by the name of its exception, or of its status."""
VALUE_CHARACTERS = 200
MOST_ERRORS = 50
"""Lines of one `detail`."""
LINE_CHARACTERS = 2000
REQUEST_ID = "x-request-id"
HEADERS: Mapping[int, dict[str, str]] = {401: {"WWW-Authenticate": 'Bearer realm="penstock"'}}
"""By status."""
PHRASES: Mapping[int, str] = {413: "Content Too Large"}
"""By status, of those that Python's releases name differently."""
INVALID, EXPECTED, MISSING = " is not valid: ", "expected ", "missing: "
"""The words around a value in the form that services.settings.faults owns."""

_WORDS = re.compile(r"(?<!^)(?=[A-Z])")


class _Cut:
    """Stands for a value whose text is too long."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class UnexpectedProblem(StatusProblem):
    """An error of ours. What the exception says is in the log only."""

    type_ = "unexpected"
    title = "Unexpected error"
    status = 500

    def __init__(self, _: str = "") -> None:
        super().__init__("an unexpected error; the gateway's log has it under this request_id")


def problem_of(status: int, detail: str, kind: str = "", headers: Mapping[str, str] | None = None) -> Problem:
    """The problem of a status; one line of `detail` per fault. `kind`: its type, by default that of the status."""
    lines = [_cut_line(line) for line in _clean(detail).split("\n")]
    kept = lines[:MOST_ERRORS]
    if len(lines) > MOST_ERRORS:
        kept.append(f"and {len(lines) - MOST_ERRORS} more")
    errors = [found for line in kept if (found := _parts(line))]
    phrase = PHRASES.get(status) or HTTPStatus(status).phrase
    return Problem(
        title=kind.replace("-", " ").capitalize() if kind else phrase,
        type_=kind or phrase.lower().replace(" ", "-"),
        status=status,
        detail="\n".join(kept),
        headers={**HEADERS.get(status, {}), **(headers or {})},
        **({"errors": errors} if errors else {}),
    )


def refusal(scope: Scope, status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response of what refuses a request before any route sees it."""
    answer: Response = _handler({})(Request(scope), problem_of(status, detail, headers=headers))
    return answer


def answer_problems(app: FastAPI, statuses: Mapping[type[Exception], int]) -> None:
    """Let the application answer these exceptions, derived ones included, and FastAPI's own, as problems."""
    handler = _handler(statuses)

    async def respond(request: Request, error: Exception) -> Response:
        answer: Response = handler(request, error)
        return answer

    for kind in (*statuses, HTTPException, RequestValidationError, Problem):
        app.add_exception_handler(kind, respond)


def _handler(statuses: Mapping[type[Exception], int]) -> ExceptionHandler:
    return new_exception_handler(
        handlers={kind: _known(status) for kind, status in statuses.items()},
        unhandled_wrappers={"default": UnexpectedProblem},
        http_exception_handler=_http_problem,
        request_validation_handler=_request_problem,
        post_hooks=[_with_request_id],
        documentation_uri_template=TYPES,
    )


def _known(status: int) -> Any:
    def problem(_: ExceptionHandler, __: Request, error: Exception) -> Problem:
        public = next(each for each in type(error).__mro__ if not each.__name__.startswith("_"))
        return problem_of(status, str(error), _WORDS.sub("-", public.__name__.removesuffix("Error")).lower())

    return problem


def _http_problem(_: ExceptionHandler, request: Request, error: Any) -> Problem:
    allowed = {"Allow": ", ".join(_allowed(request))} if error.status_code == 405 else {}
    return problem_of(error.status_code, str(error.detail), headers={**(error.headers or {}), **allowed})


def _allowed(request: Request) -> list[str]:
    """The methods of all routes of a path; the exception knows only those of the first one."""
    matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _request_problem(_: ExceptionHandler, __: Request, error: RequestValidationError) -> Problem:
    lines = []
    for fault in error.errors():
        if fault["type"] == "json_invalid":  # of the body as a whole; its place is a number of characters
            why = str(fault.get("ctx", {}).get("error", "")).lower()
            lines.append(f"body: not JSON at character {fault['loc'][-1]} ({why}): expected one JSON document")
            continue
        where = ".".join(str(part) for part in fault["loc"] if part != "body")
        lines.append(explained(where or "body", {**fault, "input": _cut(fault.get("input"))}).replace("\n", " "))
    return problem_of(422, "\n".join(lines), "invalid-request")


def _with_request_id(content: dict[str, Any], request: Request, response: Response) -> tuple[dict[str, Any], Response]:
    """The library's hook: the id is a member of the problem too, so that a user can quote it."""
    if known := request_id_of(request.scope):
        content = {**content, "request_id": known}
        response.body = response.render(content)
    return content, response


def request_id_of(scope: Scope) -> str:
    """The id that `RequestIds` has given a request; "" outside of it."""
    found: str = scope.get("state", {}).get("request_id", "")
    return found


class RequestIds:
    """Gives each request an id, which its response carries, and answers unexpected exceptions as problems.

    It must be the outermost one: what it encloses sees the exception, and may count it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, started = secrets.token_hex(8), False
        scope.setdefault("state", {})["request_id"] = name

        async def identified(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (REQUEST_ID.encode(), name.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, identified)
        except Exception:
            log.exception("request %s: %s %r failed", name, scope["method"], scope["path"][:VALUE_CHARACTERS])
            if started:
                raise
            response: Response = _handler({})(Request(scope), UnexpectedProblem())
            await response(scope, receive, identified)


def _clean(text: str) -> str:
    """The text without lone surrogates, which no encoding of a response can express."""
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(value: Any) -> Any:
    text = shown(value)
    return value if len(text) <= VALUE_CHARACTERS else _Cut(_shortened(text))


def _shortened(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else f"{text[: VALUE_CHARACTERS - 3]}..."


def _cut_line(line: str) -> str:
    field, value, expected = _split(line)
    if expected and max(len(value), len(field)) > VALUE_CHARACTERS:
        line = f"{_shortened(field)}: {_shortened(value)}{INVALID}{expected}"
    elif len(field) > VALUE_CHARACTERS and field != line:
        line = f"{_shortened(field)}{line[len(field) :]}"
    return line if len(line) <= LINE_CHARACTERS else f"{line[: LINE_CHARACTERS - 3]}..."


def _split(line: str) -> tuple[str, str, str]:
    """Field, value, and the rest of a line; without a rest it has another form."""
    field, _, stated = line.partition(": ")
    value, _, expected = stated.partition(INVALID)
    return field, value, expected


def _parts(line: str) -> dict[str, str | None] | None:
    """Field, value and what is expected, where a line states them."""
    field, value, expected = _split(line)
    if expected:
        return {"field": field, "value": value, "expected": expected.removeprefix(EXPECTED)}
    if value.startswith(MISSING):
        return {"field": field, "value": None, "expected": value.removeprefix(MISSING).removeprefix(EXPECTED)}
    return None
