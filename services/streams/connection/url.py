"""Owns the address of Redis: one server, or a service that Sentinels watch; plain or with TLS.

Must not open a connection, nor show a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

EXPECTED = (
    "expected redis://host:port/db, rediss://host:port/db (TLS), redis+sentinel://host:port,host:port/SERVICE/db or "
    "rediss+sentinel://host:port,host:port/SERVICE/db"
)
# By scheme: whether it means TLS, whether its hosts are Sentinels, and the default port.
_SCHEMES = {
    "redis": (False, False, 6379),
    "rediss": (True, False, 6379),
    "redis+sentinel": (False, True, 26379),
    "rediss+sentinel": (True, True, 26379),
}
_SCHEME = re.compile(r"[A-Za-z0-9+.-]+://")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_PATH = {False: re.compile(r"()([0-9]*)/?"), True: re.compile(r"([A-Za-z0-9._-]+)(?:/([0-9]*))?/?")}
HIDDEN = "***"
"""Shown instead of a part that may be a password."""


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL. `hosts` are (host, port): the one server, or the Sentinels that watch `service`."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    service: str | None
    db: int
    username: str | None
    password: str | None = field(repr=False)

    @property
    def tls(self) -> bool:
        """Whether connections to servers and Sentinels use TLS."""
        return _SCHEMES[self.scheme][0]

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return "/".join((f"{self.scheme}://{hosts}", *([self.service] if self.service else []), str(self.db)))


def parse_redis_url(url: str) -> RedisUrl:
    """Parse `url`. Raises ValueError, which names the option, the value without credentials, and what is expected.

    A password may contain any character: it ends at the last @.
    """
    if not url:
        raise ValueError(f"--redis: no value, and PENSTOCK_REDIS is not set; {EXPECTED}")
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise _invalid(url, "unknown scheme")
    _, watched, port = _SCHEMES[scheme]
    login, _, place = rest.rpartition("@")
    if "?" in place or "#" in place:
        raise _invalid(url, "a part after ? or # is not supported")
    hosts, _, path = place.partition("/")
    found = _PATH[watched].fullmatch(path)
    if found is None:
        part = "a service's name and a database number" if watched else "a database number"
        raise _invalid(url, f"{part} must follow the {'hosts' if watched else 'host'}")
    username, _, password = login.partition(":")
    return RedisUrl(
        scheme=scheme,
        hosts=_hosts(url, hosts, watched, port),
        service=found[1] or None,
        db=int(found[2] or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _hosts(url: str, text: str, several: bool, default: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for part in text.split(","):
        found = _HOST.fullmatch(part)
        port = int(found[2] or default) if found else 0
        if found is None or not 1 <= port <= 65535:
            shown = part if found or "@" in url else HIDDEN
            raise _invalid(url, f"{shown!r} is not a host and a port from 1 to 65535")
        hosts.append((found[1].strip("[]"), port))
    if len(hosts) > 1 and not several:
        raise _invalid(url, "several servers; a Redis Cluster is not supported")
    return tuple(hosts)


def _invalid(url: str, why: str) -> ValueError:
    return ValueError(f"--redis (PENSTOCK_REDIS): {_without_credentials(url)!r} is not valid: {EXPECTED}; {why}")


def redacted(url: str) -> str:
    """Any address, valid or not, without its credentials, fit for a log."""
    try:
        return str(parse_redis_url(url))
    except ValueError:
        return _without_credentials(url)


def _without_credentials(url: str) -> str:
    """The parts of a possibly invalid URL that cannot be a password. Without an @, any part may be one."""
    scheme, separator, rest = url.partition("://") if _SCHEME.match(url) else ("", "", url)
    _, ends, place = rest.rpartition("@")
    place = re.split("[?#]", place)[0]
    return scheme + separator + (place if ends or not place or _harmless(scheme, place) else HIDDEN)


def _harmless(scheme: str, place: str) -> bool:
    hosts, _, path = place.partition("/")
    watched = scheme in _SCHEMES and _SCHEMES[scheme][1]
    named = not path or _PATH[watched].fullmatch(path) is not None
    return named and all(_HOST.fullmatch(part) for part in hosts.split(","))
