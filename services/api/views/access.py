"""Owns the schemas of who may do what: the principal, projects with their quotas, the audit log.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.api.access.settings import ProjectQuota, RoleWord


class WhoView(BaseModel):
    """Who asks. `roles`: by project, `*` for all. `expires_at`: Unix seconds; null: never."""

    name: str
    roles: dict[str, RoleWord]
    expires_at: float | None


class UseView(BaseModel):
    """What the active runs of a project use together; `redis_memory`: planned bytes."""

    gpus: float
    runs: int
    redis_memory: int


class ProjectView(BaseModel):
    """A project, your role in it, its quota (null: no limit) and what its active runs use."""

    name: str
    role: RoleWord
    quota: ProjectQuota
    use: UseView


class ProjectList(BaseModel):
    """The projects that are visible to you, by name."""

    projects: list[ProjectView]
