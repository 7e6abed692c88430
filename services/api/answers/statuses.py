"""Owns which statuses each kind of route can answer with besides success, and what each means.

Must not know a route by more than its parameters; exceptions are in OTHERS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

MEANINGS: Mapping[int, str] = {
    304: "The run has not changed since the revision of `If-None-Match`.",
    400: "The Host header is missing or not valid, or the body is no text in UTF-8, or nested too deeply.",
    401: "The bearer token is missing or not valid.",
    403: "The role does not allow it, or the request comes from a page of another origin.",
    404: "There is no such run, or it is in a project that is not visible; or no such part of it.",
    408: "The body was sent too slowly.",
    409: "The state of the run does not allow it, or the id is in use.",
    412: "The run has changed since the revision of `If-Match`.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    416: "The file has no such range.",
    421: "The Host header names another host.",
    422: "A parameter or a field of the body is not valid; `errors` names each.",
    429: "Too many requests; `Retry-After` says when to ask again.",
    503: "Redis, or what else is needed, does not answer or has no room; the request may be repeated.",
}
GUARDED = (400, 403, 413, 421)
"""Of every route: what a request must pass before."""
CLOSED = (401, 429, 503)
"""Of every route that needs a token."""
WITH_RUN = (404,)
WITH_BODY = (408, 415, 422)
CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
BY_HEADER: Mapping[str, int] = {"if-match": 412, "if-none-match": 304}
OTHERS: Mapping[str, tuple[int, ...]] = {
    "submit_run": (409,),
    "check_ready": (503,),
    "download_checkpoint_file": (416,),
    "download_exported_file": (416,),
    "compare_runs": (404,),
}
"""By operation id: statuses that its parameters do not show."""


@dataclass(frozen=True)
class Parameters:
    """The names of a route's parameters, its dependencies' included.

    `queries`: those of the query; `headers`: those that may be wrong or decide a status, in small letters.
    """

    queries: frozenset[str]
    headers: frozenset[str]


def parameters_of(route: APIRoute) -> Parameters:
    """What a route takes besides its body. A path's text is never wrong: at most it names nothing."""
    queries, headers = set[str](), set[str]()
    for dependant in _all(route.dependant):
        queries |= {field.alias for field in dependant.query_params}
        headers |= {field.alias.lower() for field in dependant.header_params if _may_be_wrong(field)}
        headers |= {field.alias.lower() for field in dependant.header_params if field.alias.lower() in BY_HEADER}
    return Parameters(frozenset(queries), frozenset(headers))


def _may_be_wrong(field: ModelField) -> bool:
    """Whether there is a text that it does not accept."""
    return field.field_info.annotation not in (str, str | None) or bool(field.field_info.metadata)


def _all(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _all(inner)


def statuses_of(route: APIRoute, method: str, *, closed: bool) -> list[int]:
    """The statuses of a route besides success and 405, in order. `closed`: it needs a token."""
    found, taken = {*GUARDED, *OTHERS.get(route.name, ())}, parameters_of(route)
    if closed:
        found |= {*CLOSED, 422}  # it may be sent a query parameter that it does not take
    if "{run}" in route.path:
        found |= set(WITH_RUN)
        if method in CHANGES:
            found.add(409)
    if route.body_field is not None:
        found |= set(WITH_BODY)
    if taken.headers - BY_HEADER.keys():
        found.add(422)
    found |= {status for header, status in BY_HEADER.items() if header in taken.headers}
    return sorted(found)
