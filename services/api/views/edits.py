"""Owns the body of a request that edits a run's settings in flight.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.settings.base import MOST_REPLICAS
from services.settings.sections import MOST_BUDGET
from services.streams.runs.edits import PRIORITIES

UNSET: Any = None
"""The default of a setting that keeps its value; null is a value of budgets alone."""


class EditRequest(BaseModel):
    """The settings to change, by their dotted names in the recipe; `priority` is the run's."""

    # The error of a setting that cannot change lists those that can.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})

    learning_rate: float = Field(UNSET, alias="learner.learning_rate", gt=0, allow_inf_nan=False)
    max_staleness: int = Field(UNSET, alias="limits.max_staleness", ge=0, lt=2**31)
    max_inflight_groups: int = Field(UNSET, alias="limits.max_inflight_groups", ge=1, lt=2**31)
    budget: float | None = Field(UNSET, alias="limits.budget", gt=0, le=MOST_BUDGET)
    gpu_hours: float | None = Field(UNSET, alias="limits.gpu_hours", gt=0, le=MOST_BUDGET)
    evaluation_every: int = Field(UNSET, alias="evaluation.every", ge=0, lt=2**31)
    rollout_replicas: int = Field(UNSET, alias="rollout.replicas", ge=1, le=MOST_REPLICAS)
    verifier_replicas: int = Field(UNSET, alias="verifier.replicas", ge=1, le=MOST_REPLICAS)
    tuning_mode: Literal["off", "report", "on"] = Field(UNSET, alias="tuning.mode")
    priority: int = Field(UNSET, ge=PRIORITIES[0], le=PRIORITIES[-1])
