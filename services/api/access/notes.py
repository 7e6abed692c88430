"""Owns what a route adds to the audit entry of its request: the run and the project, which its path may not name.

Must not be read by routes.
"""

from __future__ import annotations

from contextvars import ContextVar

NOTES: ContextVar[dict[str, str] | None] = ContextVar("penstock_audit_notes", default=None)
"""Of the request that is served; the audit guard makes it."""


def note(*, run: str = "", project: str = "") -> None:
    """Name the run or the project that the request changes."""
    notes = NOTES.get()
    if notes is not None:
        notes |= {name: value for name, value in (("run", run), ("project", project)) if value}
