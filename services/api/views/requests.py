"""Owns the bodies of requests that submit and change runs.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.api.views.edits import UNSET
from services.settings.base import MOST_REPLICAS
from services.streams.runs.edits import PRIORITIES
from services.streams.state.run_record import DEFAULT_PROJECT

PROJECT = r"^[a-z0-9][a-z0-9-]{0,62}$"


class Request(BaseModel):
    """A request body; unknown fields are rejected, and so are values of another type: true is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SubmitRequest(Request):
    """A run to submit. `recipe` is validated by the same rules as `penstock validate`.

    `files`: the texts of the files beside it, by the names that its rewards give them, such as `./rewards.py`.
    `project`: whose roles and quotas apply to it. `priority`: queued runs with a higher one are placed first.
    """

    recipe: dict[str, Any]
    files: dict[str, str] = Field(default_factory=dict)
    id: str | None = Field(default=None, description="generated from the recipe's name if absent")
    project: str = Field(default=DEFAULT_PROJECT, pattern=PROJECT)
    priority: int = Field(default=0, ge=PRIORITIES[0], le=PRIORITIES[-1])


class CloneRequest(Request):
    """A copy of a run to submit. `overrides`: values of the recipe by their dotted names; the others are the run's.

    `project`: by default the run's. `priority`: see SubmitRequest.
    """

    overrides: dict[str, Any] = Field(default_factory=dict)
    id: str | None = Field(default=None, description="generated from the recipe's name if absent")
    project: str | None = Field(default=None, pattern=PROJECT)
    priority: int = Field(default=0, ge=PRIORITIES[0], le=PRIORITIES[-1])


class AdoptRequest(Request):
    """A run to adopt, by the name of its folder. `project`: to which it then belongs."""

    id: str
    project: str = Field(default=DEFAULT_PROJECT, pattern=PROJECT)


class ScaleRequest(Request):
    """Desired number of replicas of a run's fleets, of at least one; the other one keeps its number."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    rollout: int = Field(UNSET, ge=1, le=MOST_REPLICAS)
    verifier: int = Field(UNSET, ge=1, le=MOST_REPLICAS)


class ResumeRequest(Request):
    """Where to resume, and with how many ranks and replicas; absent fields keep their value.

    `from_step`: rewind to this rollout step, which needs a checkpoint; 0: the initial model; absent: no rewind.
    """

    from_step: int | None = Field(default=None, ge=0, lt=2**31)
    learner_ranks: int | None = Field(default=None, ge=1, le=65536)
    rollout: int | None = Field(default=None, ge=1, le=1024)
