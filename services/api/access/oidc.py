"""Owns sign-in with tokens of an OpenID Connect issuer: its keys, and which claims of a token are accepted.

Must not accept an algorithm that the token chooses, nor fetch keys more often than FETCH_S allows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import warnings
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidKeyIdError, JoseError, SecurityWarning
from joserfc.jwk import KeySet

from services.api.access.roles import AccessUnavailableError, Principal, Role, UnauthenticatedError
from services.api.access.settings import OidcSettings, protected_address

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "ES256", "EdDSA", "Ed25519")
"""Asymmetric ones only: a public key must never serve as a shared secret."""
LEEWAY_S = 30
"""How far clocks may differ."""
DEADLINE_S = 5.0
"""For one answer of the issuer."""
FRESH_S = 3600.0
FETCH_S = 30.0
"""How often keys are fetched at most, whatever key ids the tokens of strangers name."""
STALE_S = 24 * 3600.0
"""How long keys are used while the issuer does not answer."""
MOST_BYTES = 512 * 1024
MOST_GROUPS = 1000
NAME_CHARACTERS = 100
UNREADABLE = (JoseError, ValueError, RecursionError)
"""What a token of any text may raise."""
DISCOVERY = "/.well-known/openid-configuration"


def is_signed_token(token: str) -> bool:
    """Whether it has the form of a JSON Web Token."""
    return token.startswith("eyJ") and token.count(".") == 2


class Issuer:
    """An issuer, and its keys, which are fetched when they are needed."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._claims = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_S,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "value": settings.audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        self._keys: KeySet | None = None
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching = asyncio.Lock()

    async def identify(self, token: str) -> Principal:
        """Whom a token vouches for. Raises UnauthenticatedError, AccessUnavailableError."""
        try:
            claims = _decoded(token, await self._known_keys())
        except InvalidKeyIdError:  # the issuer may have replaced its keys
            try:
                claims = _decoded(token, await self._known_keys(replaced=True))
            except UNREADABLE as error:
                raise _refused(error) from None
        except UNREADABLE as error:
            raise _refused(error) from None
        try:
            self._claims.validate(claims)
        except JoseError as error:
            raise _refused(error) from None
        return self._principal(claims)

    def _principal(self, claims: dict[str, Any]) -> Principal:
        settings = self._settings
        name = claims.get(settings.name_claim)
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise UnauthenticatedError(
                f"authorization: the token is not valid: expected a claim {settings.name_claim!r} that is a name"
            )
        given = claims.get(settings.groups_claim, [])
        groups = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        roles: dict[str, Role] = {}
        for group in groups[:MOST_GROUPS]:
            for project, word in (settings.groups.get(group, {}) if isinstance(group, str) else {}).items():
                roles[project] = max(Role[word.upper()], roles.get(project, Role.VIEWER))
        return Principal(f"oidc:{name[:NAME_CHARACTERS]}", roles, float(claims["exp"]))

    async def _known_keys(self, *, replaced: bool = False) -> KeySet:
        """The issuer's keys; `replaced`: those known are not enough. Raises AccessUnavailableError."""
        async with self._fetching:
            now = time.monotonic()
            wanted = replaced or self._keys is None or now - self._fetched_at > FRESH_S
            if wanted and now - self._tried_at > FETCH_S:
                self._tried_at = now
                try:
                    self._keys, self._fetched_at = await self._fetch(), time.monotonic()
                except (httpx.HTTPError, OSError, JoseError, ValueError, TimeoutError) as error:
                    log.warning("the keys of issuer %s cannot be fetched: %s", self._settings.issuer, error)
            if self._keys is None or now - self._fetched_at > STALE_S:
                raise AccessUnavailableError("the keys of the issuer cannot be fetched; retry in 30 s")
            return self._keys

    async def _fetch(self) -> KeySet:
        settings = self._settings
        context = ssl.create_default_context(cafile=settings.ca_file)
        async with (
            asyncio.timeout(2 * DEADLINE_S),
            httpx.AsyncClient(timeout=DEADLINE_S, verify=context, follow_redirects=False) as client,
        ):
            found = await _read(client, settings.issuer.rstrip("/") + DISCOVERY)
            if found.get("issuer") != settings.issuer:
                raise ValueError(f"issuer: {str(found.get('issuer'))[:200]!r} is not valid: expected that of the file")
            return KeySet.import_key_set(await _read(client, protected_address(str(found.get("jwks_uri")))))  # type: ignore[arg-type]  # the library checks it


async def _read(client: httpx.AsyncClient, address: str) -> dict[str, Any]:
    """A JSON object at an address. Raises httpx.HTTPError, ValueError."""
    body = b""
    async with client.stream("GET", address) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{address} answered {answer.status_code}: expected 200")
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ValueError(f"{address} answered more than {MOST_BYTES} bytes")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{address} did not answer an object of JSON")
    return found


def _decoded(token: str, keys: KeySet) -> dict[str, Any]:
    with warnings.catch_warnings():
        # EdDSA has a newer name, Ed25519, which not all issuers use yet.
        warnings.simplefilter("ignore", SecurityWarning)
        return jwt.decode(token, keys, algorithms=ALGORITHMS).claims


def _refused(error: Exception) -> UnauthenticatedError:
    """The library's texts name a claim or a fault, and never quote the token."""
    why = "it has expired" if isinstance(error, ExpiredTokenError) else getattr(error, "error", "it cannot be read")
    return UnauthenticatedError(f"authorization: the token is not valid: {why}")
