"""Owns what routes are given: Redis, the run records, who asks, and the run that a path names.

Must not serve a route.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from services.api.access.notes import note
from services.api.access.quotas import Quotas
from services.api.access.roles import (
    Access,
    AccessUnavailableError,
    ForbiddenError,
    Principal,
    Role,
    UnauthenticatedError,
)
from services.api.access.tokens import EXPECTED
from services.settings import Prices, load_prices
from services.streams.access.audit import AuditLog
from services.streams.connection.client import Redis
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords, UnknownRunError

LOOKED_AGAIN_S = 10.0
"""How long a principal is known while a stream is open: it may have thousands of items a minute."""


@dataclass(frozen=True)
class Platform:
    """What the gateway serves: one Redis, who has access, and the platform's prices. Raises PricesError."""

    redis: Redis
    access: Access
    prices: Prices | None = field(default_factory=load_prices)
    records: RunRecords = field(init=False)
    quotas: Quotas = field(init=False)
    audit: AuditLog = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", RunRecords(self.redis))
        object.__setattr__(self, "quotas", Quotas(self.redis, self.records, self.access))
        object.__setattr__(self, "audit", AuditLog(self.redis))


# Asynchronous although it waits for nothing: FastAPI runs any other dependency in a thread, which costs every request
# a third of a millisecond, and on a busy machine two turns of its scheduler.
async def _platform(connection: HTTPConnection) -> Platform:
    found: Platform = connection.app.state.platform
    return found


PlatformOf = Annotated[Platform, Depends(_platform)]


async def _principal(connection: HTTPConnection) -> Principal:
    """Who asks, as the guard of the application found before the body was read. Raises UnauthenticatedError."""
    principal: Principal | None = getattr(connection.state, "principal", None)
    if principal is None:
        raise UnauthenticatedError(f"authorization: missing: {EXPECTED}")
    return principal


PrincipalOf = Annotated[Principal, Depends(_principal)]


def _lacks(principal: Principal, role: Role, where: str) -> ForbiddenError:
    return ForbiddenError(f"{principal.name} lacks the role: expected {role.name.lower()}{where}")


def somewhere(role: Role) -> Callable[[Principal], Awaitable[Principal]]:
    """A dependency: who asks, with at least `role` in some project. Raises ForbiddenError."""

    async def allowed(principal: PrincipalOf) -> Principal:
        if principal.highest is None or principal.highest < role:
            raise _lacks(principal, role, " in a project")
        return principal

    return allowed


def run_with(role: Role) -> Callable[[str, Platform, Principal], Awaitable[RunRecord]]:
    """A dependency: the run of the path, in whose project who asks has at least `role`.

    Raises UnknownRunError also for a run whose project is not visible, so that ids cannot be probed; ForbiddenError.
    """

    async def allowed(run: str, platform: PlatformOf, principal: PrincipalOf) -> RunRecord:
        record = await platform.records.shown(run)
        note(run=run, project=record.project)
        found = principal.role_in(record.project)
        if found is None:
            raise UnknownRunError(f"run {run!r} does not exist")
        if found < role:
            raise _lacks(principal, role, f" in project {record.project!r}")
        return record

    return allowed


def still_views(connection: HTTPConnection, platform: Platform, project: str) -> Callable[[], Awaitable[bool]]:
    """A function for what outlasts its request: whether who asked may still read the project; see LOOKED_AGAIN_S."""
    looked_at = time.monotonic()

    async def allowed() -> bool:
        nonlocal looked_at
        if time.monotonic() - looked_at < LOOKED_AGAIN_S:
            return True
        looked_at = time.monotonic()
        try:
            principal = await platform.access.identify(connection)
        except (UnauthenticatedError, AccessUnavailableError):
            return False
        return principal.role_in(project) is not None

    return allowed


Viewer = Annotated[Principal, Depends(somewhere(Role.VIEWER))]
Operator = Annotated[Principal, Depends(somewhere(Role.OPERATOR))]
Admin = Annotated[Principal, Depends(somewhere(Role.ADMIN))]
ViewedRun = Annotated[RunRecord, Depends(run_with(Role.VIEWER))]
OperatedRun = Annotated[RunRecord, Depends(run_with(Role.OPERATOR))]
OwnedRun = Annotated[RunRecord, Depends(run_with(Role.ADMIN))]
