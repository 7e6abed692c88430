"""Owns how people and programs sign in to a platform: the access file, re-read when it changes, and a laptop's token.

Must not keep a token, nor accept anybody while the file cannot be used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import HTTPConnection

from services.api.access.local_token import VARIABLE as LOCAL_VARIABLE
from services.api.access.local_token import read_token
from services.api.access.oidc import Issuer, is_signed_token
from services.api.access.roles import AccessUnavailableError, Principal
from services.api.access.settings import VARIABLE, AccessFileError, AccessSettings, load_access
from services.api.access.tokens import bearer_token, find_principal, local_principal, principal_of, token_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Loaded:
    """What one version of the file says."""

    settings: AccessSettings
    principals: Mapping[str, Principal]
    issuer: Issuer | None


class PlatformAccess:
    """Access by an access file, if `path` names one, and by the laptop's token whose digest is `local`."""

    def __init__(self, path: Path | None, local: str | None = None) -> None:
        self._path = path
        self._local = {local: local_principal()} if local else {}
        self._version: tuple[int, ...] | None = None
        self._fault = ""
        self._loaded = _Loaded(AccessSettings(), self._local, None)
        if path is not None:
            self._load(path)

    async def identify(self, connection: HTTPConnection) -> Principal:
        """Who makes a request. Raises UnauthenticatedError, AccessUnavailableError."""
        token, loaded = bearer_token(connection), self._current()
        if loaded.issuer and is_signed_token(token):
            return await loaded.issuer.identify(token)
        return find_principal(loaded.principals, token)

    def settings(self) -> AccessSettings:
        """The file as it is now. Raises AccessUnavailableError."""
        return self._current().settings

    def _current(self) -> _Loaded:
        if self._path is not None and _version_of(self._path) != self._version:
            try:
                self._load(self._path)
                log.info("read the access file %s again", self._path)
            except AccessFileError as error:
                self._fault = str(error)
                log.error("the access file cannot be used, and all requests are refused: %s", error)
        if self._fault:
            raise AccessUnavailableError("the access file of this platform cannot be used; its log says why")
        return self._loaded

    def _load(self, path: Path) -> None:
        self._version = _version_of(path)  # before it is read: a change meanwhile is seen at the next request
        settings = load_access(path)
        known = self._loaded
        kept = known.issuer if settings.oidc and settings.oidc == known.settings.oidc else None
        issuer = kept or (Issuer(settings.oidc) if settings.oidc else None)
        principals = {entry.sha256: principal_of(entry) for entry in settings.tokens}
        self._loaded, self._fault = _Loaded(settings, principals | self._local, issuer), ""


def _version_of(path: Path) -> tuple[int, ...] | None:
    """What changes with the file. A mounted Secret is a link, whose target is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def platform_access(environment: Mapping[str, str] = os.environ) -> PlatformAccess:
    """Access as the environment states it. Raises AccessFileError, also if it states none: nothing is open."""
    file, local = environment.get(VARIABLE), environment.get(LOCAL_VARIABLE)
    if not file and not local:
        raise AccessFileError(
            f"{VARIABLE}: missing: expected the path of an access file (docs/operations/security.md); `penstock up` "
            "needs none, and makes a token of its own"
        )
    digest = token_digest(read_token(Path(local))) if local else None
    return PlatformAccess(Path(file) if file else None, digest)
