"""Owns how queued runs are shown.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel


class QueuedView(BaseModel):
    """A queued run: its place among all queued runs, from 1 on, and what it waits for. `since`: Unix seconds."""

    id: str
    project: str
    position: int
    priority: int
    since: float
    waits_for: str


class QueueView(BaseModel):
    """The queued runs that are visible to you, in the order in which they are placed; `length`: of all queued runs."""

    runs: list[QueuedView]
    length: int
