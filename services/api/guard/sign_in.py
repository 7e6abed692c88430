"""Owns sign-in, which comes before any part of a body is read: who asks, and how often they may.

Must not let a request reach a route of /v1 without a principal.
"""

from __future__ import annotations

from limits import RateLimitItemPerMinute
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.access.roles import Access, AccessUnavailableError, UnauthenticatedError
from services.api.answers.problems import refusal
from services.api.guard.rates import FAILURES, Rates, network_of

CLOSED = "/v1"
"""All below needs a token; else there are probes, metrics, and files that everybody has: the page, the schema."""
TOO_MANY = 429


def is_closed(path: str) -> bool:
    """Whether a path needs a token."""
    return path == CLOSED or path.startswith(f"{CLOSED}/")


def address_of(scope: Scope) -> str:
    """The address of the client, or of the proxy in front of it that is not trusted."""
    return str((scope.get("client") or ("unknown", 0))[0])


class SignIn:
    """Refuses requests without a valid token (401), and those of a principal or an address that asks too often (429).

    A valid token is accepted whatever else came from its address: many clients may share one.
    """

    def __init__(self, app: ASGIApp, access: Access, rates: Rates) -> None:
        self._app = app
        self._access = access
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http" or not is_closed(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._access.identify(HTTPConnection(scope))
            most = RateLimitItemPerMinute(self._access.settings().requests_per_minute)
        except UnauthenticatedError as error:
            if wait_s := await self._rates.wait_s(FAILURES, "sign-in", network_of(address_of(scope))):
                await _too_many(scope, wait_s, "failed sign-ins of this address")(scope, receive, send)
            else:
                await refusal(scope, 401, str(error))(scope, receive, send)
            return
        except AccessUnavailableError as error:
            await refusal(scope, 503, str(error))(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        if wait_s := await self._rates.wait_s(most, "principal", principal.name):
            await _too_many(scope, wait_s, f"requests of {principal.name}")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _too_many(scope: Scope, wait_s: int, what: str) -> ASGIApp:
    text = f"too many {what}: expected the next one in {wait_s} s"
    return refusal(scope, TOO_MANY, text, {"Retry-After": str(wait_s)})
