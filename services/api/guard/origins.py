"""Owns the check of where a browser's request comes from: no page of another origin may read or change anything.

Must not send a CORS header: there is no other origin to share with.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.answers.problems import refusal

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that need no token: kubelets and Prometheus have none."""
SAFE = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""
OWN = frozenset({"same-origin", "none"})
"""Sec-Fetch-Site of the own page, and of what a user typed or opened."""
PORTS = {"http": 80, "https": 443}


class OriginCheck:
    """Refuses (403) a request whose Origin is not the host that it asks, or that a browser marks as from elsewhere.

    A link on another page may open ours: that request is a navigation, and reads no data.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] == "http" and (fault := _fault(scope)):
            await refusal(scope, 403, fault)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _fault(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    origins = headers.getlist("origin")
    if len(origins) > 1 or (origins and not _is_own(origins[0], headers.get("host", ""))):
        return "origin: the header is not valid: expected the origin of this API, or none"
    site = headers.get("sec-fetch-site", "none").lower()
    if site in OWN or origins:
        return None
    opens_page = scope["method"] in SAFE and headers.get("sec-fetch-mode", "").lower() == "navigate"
    if opens_page and not scope["path"].startswith("/v1/"):
        return None
    return "sec-fetch-site: the header is not valid: expected a request of this API's own page"


def _is_own(origin: str, host: str) -> bool:
    """Whether an Origin is that of a Host. The scheme may differ behind a proxy that ends TLS."""
    try:
        parts, asked = urlsplit(origin), urlsplit(f"//{host}")
        standard = PORTS.get(parts.scheme)
        return (
            standard is not None
            and parts.hostname is not None
            and parts.hostname == asked.hostname
            and (parts.port or standard) == (asked.port or standard)
        )
    except ValueError:
        return False
