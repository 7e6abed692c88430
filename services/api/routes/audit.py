"""Owns the REST route of the audit log.

Must not show a project's changes to principals who are not its administrators.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from services.api.access.roles import Role
from services.api.dependencies import Admin, PlatformOf
from services.streams.access.audit import AuditEntry, AuditPage

CURSOR = r"^([+]|[0-9]{1,19}-[0-9]{1,19})$"
NAME_CHARACTERS = 200

router = APIRouter(prefix="/v1", tags=["access"])

Filter = Annotated[str, Query(max_length=NAME_CHARACTERS)]


@router.get("/audit")
async def list_changes(
    platform: PlatformOf,
    principal: Admin,
    before: Annotated[str, Query(pattern=CURSOR)] = "+",
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    run: Filter = "",
    by: Filter = "",
    project: Filter = "",
) -> AuditPage:
    """Changes and denied requests, newest first: who, what, when, from where, with which result.

    An administrator of a single project sees the changes in it. `before`: the `next` of the previous page.
    """
    stated = [(name, value) for name, value in (("run", run), ("principal", by), ("project", project)) if value]

    def wanted(entry: AuditEntry) -> bool:
        # An entry without a project belongs to no project: only `*` gives a role in it.
        return principal.role_in(entry.project) is Role.ADMIN and all(
            getattr(entry, name) == value for name, value in stated
        )

    if before == "+":
        kept = platform.access.settings().audit
        await platform.audit.sweep(kept.entries, kept.days)
    return await platform.audit.page(before, limit, wanted)
