"""Owns the refusal of query parameters that a route does not take (422): a misspelt one would be ignored.

Must not check a value.
"""

from __future__ import annotations

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from services.api.answers.statuses import parameters_of
from services.api.guard.sign_in import is_closed
from services.settings.faults import invalid

UNKNOWN = 422


async def known_query(request: Request) -> None:
    """A dependency of every route that needs a token: `DELETE /v1/runs?dryrun=true` must not delete.

    The others ignore what they do not know: a probe or a scrape may carry parameters of its own.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute) or not is_closed(route.path):
        return
    known = parameters_of(route).queries
    expected = f"one of {', '.join(sorted(known))}" if known else "no query parameter"
    if unknown := [name for name in request.query_params if name not in known]:
        raise HTTPException(UNKNOWN, "\n".join(invalid("query", name, expected) for name in unknown))
