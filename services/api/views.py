"""Owns the shapes of the REST API: requests and responses, as OpenAPI documents them.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.contracts import EvaluationRecord, Event, GroupCounts, ProcessInfo, RunState, StepRecord, Transition
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


class RunSummary(BaseModel):
    """A run in a list."""

    id: str
    state: RunState
    reason: str
    created_at: float
    rollout_replicas: int


class RunView(RunSummary):
    """A run, whole. Times are Unix seconds; `events` are the last 50."""

    recipe: Recipe
    history: list[Transition]
    policy_version: int | None
    rollout_steps: int
    rollout_steps_total: int
    groups: GroupCounts
    processes: list[ProcessInfo]
    events: list[Event]
    evaluations: list[EvaluationRecord]
    export_path: str | None
    summary: dict[str, Any] | None


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
