"""Owns what all calls share: the transport, the paths of runs, lists that are read page by page.

Must not know a route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from penstock_client.answers import as_model
from penstock_client.models import Run
from penstock_client.transport import Transport

FIRST = "0-0"
"""The cursor before the first entry of a stream."""


class ApiCalls:
    """Calls of the API that `transport` reaches. Every method raises ApiError."""

    def __init__(self, transport: Transport) -> None:
        self._http = transport
        self.url = transport.url

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """The JSON of any route, such as `call("GET", "/v1/runs", limit=5)`; parameters that are None are left out."""
        return self._http.call(method, path, body=body, params=params)

    def _run(self, document: Any) -> Run:
        return as_model(self.url, Run, document)

    def _entries(
        self, run: str, route: str, known: TypeAdapter[list[Any]], cursor: Callable[[Any], str]
    ) -> Iterator[Any]:
        """The entries of a route that lists those after a cursor; the last page is empty."""
        after = FIRST
        while page := as_model(self.url, known, self._http.call("GET", of(run, route), params={"after": after})):
            yield from page
            after = cursor(page[-1])


def of(run: str, route: str = "") -> str:
    """The path of a route of one run, whatever characters the id has."""
    return f"/v1/runs/{quote(run, safe='')}{route}"
