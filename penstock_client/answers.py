"""Owns the judgement of an HTTP answer: the JSON of Penstock's API, an error of it, or something else's answer.

Must not send a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock_client.errors import (
    ApiError,
    NotThePlatformError,
    PlatformUnavailableError,
    RoleMissingError,
    TokenRefusedError,
)

Known = TypeVar("Known")
BY_STATUS: dict[int, type[ApiError]] = {
    401: TokenRefusedError,
    403: RoleMissingError,
    503: PlatformUnavailableError,
}
HINTS = {
    401: "give a token of this platform: --token-file, --token or PENSTOCK_TOKEN",
    403: "ask an administrator of the platform for it, or use the token of someone who has it",
}
NO_ROUTE = {404: "Not Found", 405: "Method Not Allowed"}
"""What the API answers when it lacks the route itself."""
MOST_SHOWN = 16_000
MOST_ID = 64
UNEXPECTED = 500
"""From this status on the fault is not the request's."""
JSON_TYPES = ("application/json", "application/problem+json")


def read_answer(url: str, path: str, status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """The JSON of an answer of the API at `url`. Raises ApiError for every other answer."""
    if 300 <= status < 400:
        place = _place(headers.get("location", ""))
        raise NotThePlatformError(
            f"--api: {url} answers with a redirect{place}, which is not followed: expected Penstock's API; "
            "a proxy in front of it may want a login (--header)",
            status,
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    document = _document(body) if kind in JSON_TYPES else None
    if status >= 400:
        raise _refusal(url, path, status, kind, document)
    if document is None:
        raise NotThePlatformError(_unknown(url, status, kind), status)
    return document


def as_model(url: str, known: type[Known] | TypeAdapter[Known], document: Any) -> Known:
    """A JSON document of the API as a model, or a list of models. Raises NotThePlatformError."""
    adapter = known if isinstance(known, TypeAdapter) else TypeAdapter(known)
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the document"
        raise NotThePlatformError(
            f"--api: {url} answers JSON that is not Penstock's, or of a release that this client cannot read "
            f"({field}: {first['msg']})"
        ) from None


def as_json(known: BaseModel) -> dict[str, Any]:
    """A model as the API sent it, with the fields that this release does not know."""
    found: dict[str, Any] = known.model_dump(mode="json", exclude_unset=True)
    return found


def _document(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _refusal(url: str, path: str, status: int, kind: str, document: Any) -> ApiError:
    problem = document if isinstance(document, dict) else {}
    detail, title = (found if isinstance(found := problem.get(name), str) else "" for name in ("detail", "title"))
    if not detail and not title:
        if status in (401, 403):
            text = f"--api: {url} refuses access ({status}), but not as Penstock's API does: a proxy in front of it"
            return NotThePlatformError(f"{text} may want a login (--header)", status)
        return NotThePlatformError(_unknown(url, status, kind), status)
    if detail == NO_ROUTE.get(status):
        text = f"--api: {url} has no route {path}: it may be of an older release than this client"
        return NotThePlatformError(text, status)
    errors = [entry for entry in problem.get("errors") or () if isinstance(entry, dict)]
    lines = [detail or title, *(line for entry in errors if (line := _line(entry)) and not _says(detail, entry))]
    text = "\n".join(lines)[:MOST_SHOWN]
    if hint := HINTS.get(status):
        text = f"{text}; {hint}"
    request = str(problem.get("request_id") or "")[:MOST_ID]
    if status >= UNEXPECTED and request and request not in text:
        text = f"{text} (request_id {request})"
    return BY_STATUS.get(status, ApiError)(text, status, title, errors, request)


def _says(detail: str, entry: Mapping[str, Any]) -> bool:
    """Whether the problem's detail has one of its errors already."""
    return all(str(entry[name]) in detail for name in ("field", "pointer", "detail") if entry.get(name))


def _line(entry: Mapping[str, Any]) -> str:
    """One of a problem document's `errors`: where, and what."""
    where = entry.get("field") or entry.get("pointer") or ""
    what = entry.get("detail") or (f"expected {entry['expected']}" if entry.get("expected") else "")
    return f"{where}: {what}" if where and what else str(what)


def _unknown(url: str, status: int, kind: str) -> str:
    what = "a web page" if kind in ("text/html", "application/xhtml+xml") else kind[:80] or "no content type"
    return (
        f"--api: {url} answers {status} with {what}, not JSON: expected Penstock's API; "
        "a proxy's login page, or another server, may be there"
    )


def _place(location: str) -> str:
    """Scheme and host of a redirect: its path and query may hold a secret of a login."""
    scheme, separator, rest = location.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f" to {scheme}://{host[:200]}" if separator else ""
