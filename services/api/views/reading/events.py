"""Owns how what happens in a run is shown: one line of its story each, with the cursor behind it.

Must not read Redis.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from services.api.views.metrics import StepView
from services.contracts import EvaluationRecord, Event, Transition


class Happening(BaseModel):
    """Something in a run. `id`: the cursor for `after` or Last-Event-ID; `at`: Unix seconds."""

    id: str
    at: float


class EventHappening(Happening):
    """A line of the event log."""

    kind: Literal["event"] = "event"
    data: Event


class StateHappening(Happening):
    """A change of the run's state."""

    kind: Literal["state"] = "state"
    data: Transition


class StepHappening(Happening):
    """A rollout step with its metrics."""

    kind: Literal["step"] = "step"
    data: StepView


class EvaluationHappening(Happening):
    """An evaluation of one set."""

    kind: Literal["evaluation"] = "evaluation"
    data: EvaluationRecord


class EventPage(BaseModel):
    """What happened in a run, oldest first. `next`: the cursor behind it; `more`: there is more behind it now.

    `ended`: the run has ended, so that nothing follows unless it is resumed.
    """

    events: list[
        Annotated[EventHappening | StateHappening | StepHappening | EvaluationHappening, Field(discriminator="kind")]
    ]
    next: str
    more: bool
    ended: bool
