"""Owns the REST routes of projects, and of who asks.

Must not change a project; the access file does.
"""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from services.api.access.quotas import Use, use_by_project
from services.api.access.roles import Role
from services.api.access.settings import RoleWord
from services.api.dependencies import PlatformOf, PrincipalOf, Viewer
from services.api.views.access import ProjectList, ProjectView, UseView, WhoView

WORDS: dict[Role, RoleWord] = {Role.VIEWER: "viewer", Role.OPERATOR: "operator", Role.ADMIN: "admin"}

router = APIRouter(prefix="/v1", tags=["access"])


@router.get("/whoami")
async def show_principal(principal: PrincipalOf) -> WhoView:
    """Who you are, and your role in each project. It needs a valid token, but no role."""
    roles = {project: WORDS[role] for project, role in sorted(principal.roles.items())}
    return WhoView(name=principal.name, roles=roles, expires_at=principal.expires_at)


@router.get("/projects")
async def list_projects(platform: PlatformOf, principal: Viewer) -> ProjectList:
    """The projects that are visible to you: your role, the quota, and what active runs use of it."""
    settings = platform.access.settings()
    used = use_by_project(await platform.records.active())
    roles = {name: principal.role_in(name) for name in sorted({*settings.known_projects, *used})}
    return ProjectList(
        projects=[
            ProjectView(
                name=name,
                role=WORDS[role],
                quota=settings.quota(name),
                use=UseView(**asdict(used.get(name, Use()))),
            )
            for name, role in roles.items()
            if role is not None
        ]
    )
