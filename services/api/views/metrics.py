"""Owns how a run's time series and waits are shown.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.contracts import StepRecord


class StepView(StepRecord):
    """A rollout step's record; `id` is the cursor for `after`."""

    id: str


class MetricsView(BaseModel):
    """A run's time series, one entry per rollout step, oldest first."""

    steps: list[StepView]


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
