"""Owns the shapes of the REST API: requests and responses, as OpenAPI documents them.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.contracts import (
    Cause,
    EvaluationRecord,
    Event,
    GroupCounts,
    ProcessInfo,
    RunState,
    StepRecord,
    Transition,
)
from services.settings import Recipe


class Request(BaseModel):
    """A request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class SubmitRequest(Request):
    """A run to add. `recipe` is checked by the same rules as `penstock validate`."""

    recipe: dict[str, Any]
    id: str | None = Field(default=None, description="made from the recipe's name when absent")


class ScaleRequest(Request):
    """Desired replicas of a run's fleets."""

    rollout: int = Field(ge=1, le=1024)


class ResumeRequest(Request):
    """Where to go on, and with how many; what is absent stays as it was.

    `from_step` names a rollout step that has a checkpoint, 0 the initial model; absent: as far as the run had come.
    """

    from_step: int | None = Field(default=None, ge=0, lt=2**31)
    learner_ranks: int | None = Field(default=None, ge=1, le=65536)
    rollout: int | None = Field(default=None, ge=1, le=1024)


class RunSummary(BaseModel):
    """A run in a list."""

    id: str
    state: RunState
    reason: str
    created_at: float
    rollout_replicas: int


class RunView(RunSummary):
    """A run, whole. Times are Unix seconds; `events` are the last 50.

    `alerts`: what wants somebody's attention now: waits past their deadline, and why a run that starves is paused.
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
    evaluations: list[EvaluationRecord]
    export_path: str | None
    summary: dict[str, Any] | None
    pause_requested: bool
    resumptions: int
    resume_step: int | None


class WaitView(BaseModel):
    """What a process waits for; it has done so for `seconds`, and it is `stalled` once they exceed `deadline_s`."""

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
    """A message that was given up; `excerpt` is its beginning.

    `size` is in bytes. `redriven`: the name under which its group is drawn again, null if it is not.
    """

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
    redriven: str | None


class RedriveView(BaseModel):
    """What came of redriving one letter: the new name of its group, or null and why."""

    entry: str
    group: str | None
    redriven: str | None
    reason: str


class StepView(StepRecord):
    """A rollout step's record; `id` is the cursor for `after`."""

    id: str


class MetricsView(BaseModel):
    """A run's time series, one entry a rollout step, oldest first."""

    steps: list[StepView]


class RunList(BaseModel):
    """All runs, oldest first."""

    runs: list[RunSummary]


class TargetGroup(BaseModel):
    """One entry of Prometheus HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Health(BaseModel):
    """A probe's answer."""

    status: str


class Fault(BaseModel):
    """An error: what was not accepted, and what is."""

    detail: str
