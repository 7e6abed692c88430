"""Owns the Host check: a name that an attacker lets point to this address (DNS rebinding) reaches no route.

Must not resolve a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.answers.problems import refusal
from services.api.guard.origins import PROBES
from services.settings.faults import invalid

VARIABLE = "PENSTOCK_HOSTS"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9_-][a-z0-9._-]{0,252})(?::[0-9]{1,5})?", re.ASCII)
_NAME = re.compile(r"\[[0-9a-f:.]{2,45}\]|[a-z0-9_-][a-z0-9._-]{0,252}", re.ASCII)
MISDIRECTED = 421


class HostNamesError(ValueError):
    """The value of PENSTOCK_HOSTS cannot be used; one line."""


@dataclass(frozen=True)
class HostNames:
    """By which names the API is reached besides loopback's; none: by the address on which it listens as well.

    A page of another name cannot make a browser send a literal address as Host, so the own address is safe.
    """

    names: frozenset[str] = frozenset()

    def allow(self, name: str, path: str, own: str) -> bool:
        """Whether a request with this Host may reach the path. `own`: the address that the connection reached."""
        if name in LOOPBACK or name in self.names:
            return True
        # A kubelet and Prometheus address a pod by its own address.
        return name == own and (not self.names or path in PROBES)


def load_host_names(environment: Mapping[str, str] = os.environ) -> HostNames:
    """The names in PENSTOCK_HOSTS, separated by commas. Raises HostNamesError."""
    names = [name.strip().lower().rstrip(".") for name in environment.get(VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise HostNamesError(invalid(VARIABLE, name[:200], "host names without ports, separated by commas"))
    return HostNames(frozenset(names))


class HostCheck:
    """Refuses requests for another host: 421, or 400 without a host."""

    def __init__(self, app: ASGIApp, hosts: HostNames) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (the interface of ASGI applications)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).getlist("host")
        found = _HOST.fullmatch(stated[0].lower()) if len(stated) == 1 else None
        if found is None:
            await refusal(scope, 400, "host: the header is not valid: expected one host name")(scope, receive, send)
            return
        own = (scope.get("server") or ("", None))[0]
        own = f"[{own}]" if ":" in own else own
        if not self._hosts.allow(found["name"].rstrip("."), scope["path"], own):
            fault = invalid("host", found["name"], f"a name of this API (the operator sets {VARIABLE})")
            await refusal(scope, MISDIRECTED, fault)(scope, receive, send)
            return
        await self._app(scope, receive, send)
