"""Owns what tests of access share: tokens of each role, a gateway on a socket, an application in this process.

Must not be used where a test needs one token that may do everything; tests.harness.api_access has that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from services.api.access.roles import EVERY_PROJECT, Access, Principal, Role
from services.api.access.settings import AccessSettings
from services.api.access.tokens import TokenAccess, token_digest
from services.api.app import create_app
from services.api.server import serve_api
from tests.harness.free_ports import free_port

ROLES = {"viewer": Role.VIEWER, "operator": Role.OPERATOR, "admin": Role.ADMIN}
TOKENS = {name: f"token-of-the-{name}" for name in (*ROLES, "stranger", "team")}
PRINCIPALS = {
    **{name: Principal(name, {EVERY_PROJECT: role}) for name, role in ROLES.items()},
    "stranger": Principal("stranger", {}),
    "team": Principal("team", {"team-a": Role.ADMIN}),
}


def bearer(token: str) -> dict[str, str]:
    """The header that carries a token."""
    return {"authorization": f"Bearer {token}"}


def access_of(settings: AccessSettings | None = None) -> TokenAccess:
    """Access for PRINCIPALS with TOKENS."""
    digests = {token_digest(TOKENS[name]): principal for name, principal in PRINCIPALS.items()}
    return TokenAccess(digests, settings)


@asynccontextmanager
async def client_of(
    redis: Any, access: Access, headers: Mapping[str, str] = {}, address: tuple[str, int] = ("127.0.0.1", 1)
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process; `address`: of the client."""
    transport = httpx.ASGITransport(app=create_app(redis, access), client=address)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


@asynccontextmanager
async def served(redis: Any, access: Access) -> AsyncIterator[int]:
    """The port of a gateway on a socket."""
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, access, "127.0.0.1", port, stopping))
    try:
        async with asyncio.timeout(30):
            while not await _accepts(port):
                assert not serving.done(), serving
                await asyncio.sleep(0.02)
        yield port
    finally:
        stopping.set()
        await serving


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
