"""Owns bearer tokens: only their digests are stored.

Must not log or return a token.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping

from starlette.requests import HTTPConnection

from services.api.access.roles import Principal, Role, UnauthenticatedError
from services.api.access.settings import EVERY_PROJECT, AccessSettings, TokenEntry

EXPECTED = "expected a header `Authorization: Bearer TOKEN`"
LONGEST = 8192
"""Characters of a token; those of an issuer with many groups have some thousand."""


def token_digest(token: str) -> str:
    """SHA-256 (hexadecimal) of a token. Tokens are random, so a slow hash would add nothing."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def local_principal(name: str = "local") -> Principal:
    """The holder of a laptop's token, who may do everything."""
    return Principal(name, {EVERY_PROJECT: Role.ADMIN})


def principal_of(entry: TokenEntry) -> Principal:
    """The principal of an entry of the access file."""
    roles = {project: Role[word.upper()] for project, word in entry.roles.items()}
    return Principal(entry.name, roles, entry.expires.timestamp() if entry.expires else None)


def bearer_token(connection: HTTPConnection) -> str:
    """The token of a request. Raises UnauthenticatedError."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError(f"authorization: missing: {EXPECTED}")
    if len(token) > LONGEST:
        raise UnauthenticatedError(f"authorization: the token is not valid: expected at most {LONGEST} characters")
    return token.strip()


def find_principal(principals: Mapping[str, Principal], token: str) -> Principal:
    """The principal of a token. `principals`: by the digest of their token. Raises UnauthenticatedError."""
    # A look-up by digest leaks nothing of a token through its duration.
    principal = principals.get(token_digest(token))
    if principal is None:
        raise UnauthenticatedError("authorization: the token is not valid: expected a token of this platform")
    if principal.expires_at is not None and principal.expires_at <= time.time():
        raise UnauthenticatedError("authorization: the token is not valid: it has expired")
    return principal


class TokenAccess:
    """Access by bearer tokens that never change. `principals`: by the digest of their token."""

    def __init__(self, principals: Mapping[str, Principal], settings: AccessSettings | None = None) -> None:
        self._principals = dict(principals)
        self._settings = settings or AccessSettings()

    async def identify(self, connection: HTTPConnection) -> Principal:
        """Who makes a request. Raises UnauthenticatedError."""
        return find_principal(self._principals, bearer_token(connection))

    def settings(self) -> AccessSettings:
        """What it was made with."""
        return self._settings
