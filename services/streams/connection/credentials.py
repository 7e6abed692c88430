"""Owns the credentials for Redis and its Sentinels, and which certificates are trusted.

Must not show a password, nor keep one that was read from a file.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from redis import exceptions as redis_errors
from redis.credentials import CredentialProvider

from services.streams.connection.url import RedisUrl

USERNAME = "PENSTOCK_REDIS_USERNAME"
PASSWORD_FILE = "PENSTOCK_REDIS_PASSWORD_FILE"
SENTINEL_PASSWORD_FILE = "PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE"
CA_FILE = "PENSTOCK_REDIS_CA_FILE"


class RedisSettingError(redis_errors.AuthenticationError, ValueError):
    """A variable is not valid. The text names it, its value, and what is expected; never the content of its file."""


class PasswordFile(CredentialProvider):
    """A user name, and a file with the password. The file is read for each new connection: it may be rotated."""

    def __init__(self, variable: str, username: str | None) -> None:
        self._variable, self._path, self._username = variable, Path(os.environ[variable]), username
        self.get_credentials()  # now, so that a wrong file is reported before the first connection

    def __repr__(self) -> str:
        return f"<PasswordFile {self._path}>"

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(password,) or (name, password), without the line break. Raises RedisSettingError."""
        try:
            password = self._path.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise self._invalid(f"it cannot be read: {why}") from None
        if not password:
            raise self._invalid("it is empty")
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As `get_credentials`. A mounted Secret is in memory, so that reading it does not block the event loop."""
        return self.get_credentials()

    def _invalid(self, why: str) -> RedisSettingError:
        return RedisSettingError(
            f"{self._variable}: {str(self._path)!r} is not valid: expected a file with a password; {why}"
        )


def server_credentials(address: RedisUrl) -> dict[str, Any]:
    """The login of connections to Redis, as options of redis-py: the address takes precedence over the variables.

    Raises RedisSettingError.
    """
    if address.password:
        return {"username": address.username, "password": address.password}
    username = address.username or os.environ.get(USERNAME) or None
    if os.environ.get(PASSWORD_FILE):
        return {"credential_provider": PasswordFile(PASSWORD_FILE, username)}
    if username:
        given = "--redis" if address.username else USERNAME
        raise RedisSettingError(
            f"{given}: {username!r} is not valid: "
            f"expected {PASSWORD_FILE} with the path of its password file; a user needs a password"
        )
    return {}


def sentinel_credentials() -> dict[str, Any]:
    """The login of connections to Sentinels, as options of redis-py. Raises RedisSettingError."""
    if os.environ.get(SENTINEL_PASSWORD_FILE):
        return {"credential_provider": PasswordFile(SENTINEL_PASSWORD_FILE, None)}
    return {}


class TrustedCertificates:
    """Which certificates are trusted: those signed by PENSTOCK_REDIS_CA_FILE; without it, by the system's authorities.

    A certificate must be for the host of the connection. The file is read again when it has changed.
    """

    def __init__(self) -> None:
        self._file = os.environ.get(CA_FILE) or None
        self._seen: tuple[int, ...] = ()
        self._context: ssl.SSLContext | None = None
        self.get()

    def get(self) -> ssl.SSLContext:
        """The context for a new connection. Raises RedisSettingError."""
        try:
            seen = self._state()
            if self._context is None or seen != self._seen:
                self._context, self._seen = ssl.create_default_context(cafile=self._file), seen
        except OSError as error:  # ssl.SSLError, too
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise RedisSettingError(
                f"{CA_FILE}: {self._file!r} is not valid: expected a PEM file with certificates of authorities; {why}"
            ) from None
        return self._context

    def _state(self) -> tuple[int, ...]:
        if self._file is None:
            return ()
        found = Path(self._file).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
