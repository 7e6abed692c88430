"""Owns how runs are shown: one, and in lists.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from services.api.views.faults import UnknownView
from services.contracts import Closing, EvaluationRecord, Event, GroupCounts, ProcessInfo, RunEdit, RunState, Transition
from services.settings import Recipe


class RunSummary(BaseModel):
    """A run in a list. `closing`: why it can no longer be resumed, null if it can.

    `cancel_requested`: it ends as soon as its processes have. `problem`: why this release cannot read the run, null if
    it can; the other fields are what it can read of it.
    """

    id: str
    project: str
    state: RunState | Literal["unreadable"]
    reason: str
    created_at: float
    rollout_replicas: int
    closing: Closing | None
    cancel_requested: bool
    priority: int
    problem: str | None


class RunView(RunSummary):
    """All fields of a run. Times are Unix seconds; `events` are the last 50, `evaluations` the last 1,000.

    `unknown_verdicts` are the last 5 with their reasons.

    `alerts`: conditions that need attention now: waits past their deadline, and why a run paused by itself. `files`:
    the files beside the recipe that it was submitted with, SHA-256 by name. `recipe`: as it is stored where there is a
    `problem`, null if that is no mapping. `revision`: how often the record was changed. `edits`: of settings in flight,
    the oldest first. `queue_position`, from 1 on, and `waits_for`: of a queued run.
    """

    recipe: Recipe | dict[str, Any] | None
    history: list[Transition]
    policy_version: int | None
    rollout_steps: int
    rollout_steps_total: int | None
    groups: GroupCounts
    processes: list[ProcessInfo]
    events: list[Event]
    alerts: list[str]
    unknown_verdicts: list[UnknownView]
    evaluations: list[EvaluationRecord]
    export_path: str | None
    summary: dict[str, Any] | None
    pause_requested: bool
    resumptions: int
    resume_step: int | None
    files: dict[str, str]
    revision: int
    edits: list[RunEdit]
    queue_position: int | None
    waits_for: str | None


class AcceptedRun(RunView):
    """A run that was submitted or resumed. `warnings`: what may slow it down, which did not prevent it."""

    warnings: list[str]


class RunList(BaseModel):
    """A page of runs, the newest first. `next`: the `after` of the next page, null if there is none."""

    runs: list[RunSummary]
    next: str | None
