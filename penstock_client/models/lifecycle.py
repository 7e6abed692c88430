"""Owns the models of the queue, the closing of runs, and the check of recipes.

Must not decide what is allowed.
"""

from __future__ import annotations

from pydantic import Field

from penstock_client.models.base import ApiModel
from penstock_client.models.runs import RunEntry


class QueuedEntry(ApiModel):
    """A queued run: its place among all queued runs, from 1 on, and what it waits for."""

    id: str
    project: str = ""
    position: int
    priority: int = 0
    since: float = 0.0
    waits_for: str = ""


class RunQueue(ApiModel):
    """The queued runs that are visible to who asks; `length`: of all queued runs."""

    runs: list[QueuedEntry]
    length: int = 0


class UnclosedRun(ApiModel):
    """A run that was not archived or deleted, and why."""

    id: str
    reason: str = ""


class ClosedEntries(ApiModel):
    """The runs that a request archives or deletes, or would. `more`: repeat it for the others."""

    runs: list[RunEntry]
    refused: list[UnclosedRun] = Field(default_factory=list)
    more: bool = False


class FaultList(ApiModel):
    """What is wrong with a recipe, one line per fault."""

    faults: list[str]
