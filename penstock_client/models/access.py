"""Owns the models of who asks, projects and their quotas, the audit log.

Must not hold a token.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock_client.models.base import ApiModel


class Identity(ApiModel):
    """Who asks, and the role in each project, `*` for all. `expires_at`: None: never."""

    name: str
    roles: dict[str, str]
    expires_at: float | None = None


class ProjectUse(ApiModel):
    """What the active runs of a project use, or may use together; None: no limit. `redis_memory`: planned bytes."""

    gpus: float | None = None
    runs: int | None = None
    redis_memory: float | None = None


class Project(ApiModel):
    """A project, the role in it of who asks, its quota and its use."""

    name: str
    role: str
    quota: ProjectUse = ProjectUse()
    use: ProjectUse = ProjectUse()


class ProjectPage(ApiModel):
    """The projects that are visible to who asks."""

    projects: list[Project]


class AuditEntryView(ApiModel):
    """Who did what, when, from where, with which outcome."""

    at: float
    principal: str = ""
    address: str = ""
    method: str = ""
    path: str = ""
    run: str = ""
    project: str = ""
    outcome: str = ""
    status: int | None = None
    changes: dict[str, Any] = Field(default_factory=dict)


class AuditList(ApiModel):
    """Entries of the audit log, newest first; `next`: the cursor of older ones."""

    entries: list[AuditEntryView]
    next: str | None = None
