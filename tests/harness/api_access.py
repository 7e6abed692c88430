"""Owns the access of the tests' gateways: one token that may do everything.

Must not be used where access itself is tested.
"""

from __future__ import annotations

from collections.abc import Generator

import httpx

from services.api.access.local_token import read_token, token_path
from services.api.access.tokens import TokenAccess, local_principal, token_digest

TOKEN = "token-of-the-tests"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
ACCESS = TokenAccess({token_digest(TOKEN): local_principal()})


class StackToken(httpx.Auth):
    """Signs in to the stack on a port: with the token in its file, once that is there."""

    def __init__(self, port: int) -> None:
        self._path = token_path(port)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the token, read each time: a stack that is started again has another one."""
        if self._path.exists():
            request.headers["authorization"] = f"Bearer {read_token(self._path)}"
        yield request
