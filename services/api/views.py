"""Owns the schemas of the REST API: requests and responses, as OpenAPI documents them.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.contracts import (
    Cause,
    Closing,
    EvaluationRecord,
    Event,
    GroupCounts,
    Lane,
    ProcessInfo,
    RunState,
    StepRecord,
    Transition,
)
from services.settings import Recipe


class Request(BaseModel):
    """A request body; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class SubmitRequest(Request):
    """A run to submit. `recipe` is validated by the same rules as `penstock validate`.

    `files`: the texts of the files beside it, by the names that its rewards give them, such as `./rewards.py`.
    """

    recipe: dict[str, Any]
    files: dict[str, str] = Field(default_factory=dict)
    id: str | None = Field(default=None, description="generated from the recipe's name if absent")


class ScaleRequest(Request):
    """Desired number of replicas of a run's rollout fleet."""

    rollout: int = Field(ge=1, le=1024)


class ResumeRequest(Request):
    """Where to resume, and with how many ranks and replicas; absent fields keep their value.

    `from_step`: rewind to this rollout step, which needs a checkpoint; 0: the initial model; absent: no rewind.
    """

    from_step: int | None = Field(default=None, ge=0, lt=2**31)
    learner_ranks: int | None = Field(default=None, ge=1, le=65536)
    rollout: int | None = Field(default=None, ge=1, le=1024)


class RunSummary(BaseModel):
    """A run in a list. `closing`: why it can no longer be resumed, null if it can."""

    id: str
    state: RunState
    reason: str
    created_at: float
    rollout_replicas: int
    closing: Closing | None


class UnknownView(BaseModel):
    """A verdict that is unknown, and why; `excerpt`: the last characters of the response."""

    entry: str
    at: float
    lane: Lane
    prompt: str | None
    group: str
    index: int
    reason: str
    excerpt: str


class RunView(RunSummary):
    """All fields of a run. Times are Unix seconds; `events` are the last 50, `evaluations` the last 1,000.

    `unknown_verdicts` are the last 5 with their reasons.

    `alerts`: conditions that need attention now: waits past their deadline, and why a run paused by itself. `files`:
    the files beside the recipe that it was submitted with, SHA-256 by name.
    """

    recipe: Recipe
    history: list[Transition]
    policy_version: int | None
    rollout_steps: int
    rollout_steps_total: int
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


class AcceptedRun(RunView):
    """A run that was submitted or resumed. `warnings`: what may slow it down, which did not prevent it."""

    warnings: list[str]


class WaitView(BaseModel):
    """A wait of a process: it has lasted `seconds`, and is `stalled` once they exceed `deadline_s`."""

    process: str
    service: str
    name: str
    waits_for: str
    since: float
    seconds: float
    deadline_s: float
    idle: bool
    stalled: bool


class DeadView(BaseModel):
    """A dead letter; `excerpt`: the first characters of its message, which has `size` bytes."""

    entry: str
    at: float
    stream: str
    cause: Cause
    reason: str
    deliveries: int
    group: str | None
    prompt: str | None
    size: int
    excerpt: str


class StepView(StepRecord):
    """A rollout step's record; `id` is the cursor for `after`."""

    id: str


class MetricsView(BaseModel):
    """A run's time series, one entry per rollout step, oldest first."""

    steps: list[StepView]


class RunList(BaseModel):
    """All runs, oldest first."""

    runs: list[RunSummary]


class TargetGroup(BaseModel):
    """One entry of Prometheus HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Health(BaseModel):
    """A probe's response."""

    status: str


class ErrorResponse(BaseModel):
    """An error: which value is not valid, and what is expected."""

    detail: str
