"""Owns the models of runs: in lists, and all of one with its processes, waits and events.

Must not read anything.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock_client.models.base import ApiModel
from penstock_client.models.reports import UnknownVerdictEntry
from penstock_client.models.results import Evaluation

FINAL_STATES = ("succeeded", "failed", "cancelled")


class RunEntry(ApiModel):
    """A run in a list. `closing`: why it can no longer be resumed, None if it can.

    `problem`: why the platform's release cannot read the run, None if it can.
    """

    id: str
    state: str
    reason: str = ""
    created_at: float = 0.0
    rollout_replicas: int = 0
    closing: str | None = None
    project: str | None = None
    cancel_requested: bool = False
    priority: int = 0
    problem: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES


class RunEntries(ApiModel):
    """Runs of a list, and the cursor of the next page; None on the last one."""

    runs: list[RunEntry]
    next: str | None = None


class StateChange(ApiModel):
    """One change of a run's state."""

    state: str
    at: float
    reason: str = ""


class RunEvent(ApiModel):
    """One line of a run's event log."""

    service: str
    phase: str
    text: str
    at: float


class GroupFigures(ApiModel):
    """The group counters of a run at one moment."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    dead: int = 0
    pending: int = 0
    reconciled: bool = True


class OpenWait(ApiModel):
    """What a process waits for since when, and at most how many seconds. `idle`: for work, which is no fault."""

    name: str
    waits_for: str
    since: float
    deadline_s: float
    idle: bool = False


class LiveProcess(ApiModel):
    """A live process of a run."""

    id: str
    service: str
    host: str = ""
    pid: int = 0
    state: str = ""
    version: int | None = None
    waits: list[OpenWait] = Field(default_factory=list)


class SettingsEdit(ApiModel):
    """A change of settings in flight: by whom, after which rollout step; `changes`: before and after, by name."""

    by: str
    at: float
    step: int = 0
    changes: dict[str, tuple[Any, Any]] = Field(default_factory=dict)


class Run(RunEntry):
    """All of a run: the last events, all evaluations, live processes, counters."""

    recipe: dict[str, Any] | None = None
    history: list[StateChange] = Field(default_factory=list)
    policy_version: int | None = None
    rollout_steps: int = 0
    rollout_steps_total: int | None = None
    groups: GroupFigures = GroupFigures()
    processes: list[LiveProcess] = Field(default_factory=list)
    events: list[RunEvent] = Field(default_factory=list)
    alerts: list[str] = Field(default_factory=list)
    unknown_verdicts: list[UnknownVerdictEntry] = Field(default_factory=list)
    evaluations: list[Evaluation] = Field(default_factory=list)
    export_path: str | None = None
    summary: dict[str, Any] | None = None
    pause_requested: bool = False
    resumptions: int = 0
    files: dict[str, str] = Field(default_factory=dict)
    edits: list[SettingsEdit] = Field(default_factory=list)
    queue_position: int | None = None
    waits_for: str | None = None
    warnings: list[str] = Field(default_factory=list)

    @property
    def last_step(self) -> int | None:
        """The last rollout step; None where a token budget decides when the run ends."""
        budget = ((self.recipe or {}).get("limits") or {}).get("response_tokens")
        return None if budget else self.rollout_steps_total


class WaitEntry(OpenWait):
    """A wait of a process; `stalled` once it is past its deadline."""

    process: str
    service: str = ""
    seconds: float
    stalled: bool = False
