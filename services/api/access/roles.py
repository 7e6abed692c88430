"""Owns the roles, and what a principal may do in which project.

Must not know how a principal proves who it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from starlette.requests import HTTPConnection

from services.api.access.settings import EVERY_PROJECT, AccessSettings


class Role(IntEnum):
    """What a principal may do: read; also submit, change and end runs; also delete, and manage projects."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True)
class Principal:
    """Who makes a request. `roles`: by project; EVERY_PROJECT for all. `expires_at`: Unix seconds, None: never."""

    name: str
    roles: Mapping[str, Role] = field(default_factory=dict)
    expires_at: float | None = None

    def role_in(self, project: str) -> Role | None:
        """Its role in a project; None: the project is not visible to it."""
        found = [self.roles[name] for name in (project, EVERY_PROJECT) if name in self.roles]
        return max(found, default=None)

    @property
    def highest(self) -> Role | None:
        """Its highest role in any project."""
        return max(self.roles.values(), default=None)

    @property
    def sees_all(self) -> bool:
        """Whether every project is visible to it."""
        return EVERY_PROJECT in self.roles


class UnauthenticatedError(RuntimeError):
    """The request does not prove who makes it; the text says what is accepted."""


class ForbiddenError(RuntimeError):
    """The principal's role does not allow the request; the text names the role that does."""


class AccessUnavailableError(RuntimeError):
    """No principal can sign in now: the access file cannot be used, or the issuer's keys cannot be fetched."""


class Access(Protocol):
    """How principals prove who they are."""

    async def identify(self, connection: HTTPConnection) -> Principal:
        """Who makes a request. Raises UnauthenticatedError, AccessUnavailableError."""

    def settings(self) -> AccessSettings:
        """The access file as it is now; the default without one. Raises AccessUnavailableError."""
