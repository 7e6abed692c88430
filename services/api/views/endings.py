"""Owns how the archiving or deletion of many runs is answered.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.api.views.runs import RunSummary


class RefusedRun(BaseModel):
    """A run that was not closed, and why."""

    id: str
    reason: str


class ClosedList(BaseModel):
    """The runs that a request archives or deletes; with `dry_run`: would. `more`: repeat it for the others."""

    runs: list[RunSummary]
    refused: list[RefusedRun]
    more: bool
    dry_run: bool
