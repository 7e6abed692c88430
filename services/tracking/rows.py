"""Owns what a tracker gets of a run: its facts, rows of its log, how it ended, and the position in the log.

Must not know a tracker, nor read Redis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.contracts import (
    AFTER,
    ALONE,
    BEFORE,
    CommittedPolicy,
    EvaluationRecord,
    Event,
    RunState,
    StepRecord,
    Transition,
)
from services.contracts.base import Count, Finite, Value

TEXT_CHARACTERS = 1000
OWN_EVENTS = "tracker"
AT_STEP = re.compile(r"step-(?P<step>\d{1,9})")
"""The name of an evaluation between rollout steps."""


class RowKind(StrEnum):
    """What a row is: values of a step or of an evaluation, a line of text, or that later steps left the history."""

    STEP = "step"
    EVALUATION = "evaluation"
    EVENT = "event"
    STATE = "state"
    REWIND = "rewind"


class TrackCursor(Value):
    """How far a run's log was copied: the last entry of each stream, and the number of changes of state.

    `created_at`: of the run, because an id may be used again; `step`: the last rollout step; `rewinds`: how often steps
    have left the history. A sink stores the cursor beside the rows, so that neither can be newer than the other.
    """

    created_at: Finite
    steps: str = "0-0"
    evaluations: str = "0-0"
    events: str = "0-0"
    states: Count = 0
    step: Count = 0
    rewinds: Count = 0


@dataclass(frozen=True)
class TrackedRow:
    """One row: its rollout step, its time (Unix seconds), and the cursor after it. A REWIND keeps `step` itself."""

    kind: RowKind
    step: int
    at: float
    cursor: TrackCursor
    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class TrackedFacts:
    """A run as trackers show it. `folder`: its files on this node; `created_at`: Unix seconds."""

    run: str
    project: str
    created_at: float
    recipe: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class RunEnding:
    """How a run ended. `export`: where its weights are; "" without an export."""

    state: RunState
    reason: str
    export: str = ""


def flattened(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their paths, such as `limits.rollout_steps`; null is left out."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def step_row(record: StepRecord, cursor: TrackCursor) -> TrackedRow:
    """A committed rollout step: its metrics under their own names, and further axes."""
    values = {
        **record.metrics,
        "policy_version": record.version,
        "wall_seconds": record.learning_finished_at - cursor.created_at,
        "rewinds": cursor.rewinds,
    }
    return TrackedRow(RowKind.STEP, record.step, record.learning_finished_at, cursor, _finite(values))


def evaluation_row(record: EvaluationRecord, step: int, cursor: TrackCursor) -> TrackedRow:
    """An evaluation of one set at rollout step `step`; the names of its values begin with `evaluation/SET/`."""
    values = {
        "accuracy": record.accuracy,
        "standard_error": record.standard_error,
        "majority": record.majority,
        "score": record.score,
        "response_length": record.response_length,
        "truncated_share": record.truncated_share,
        "unknown": record.unknown,
        "dropped": record.dropped,
        "policy_version": record.version,
        **{f"pass_at_{found.k}": found.value for found in record.pass_at},
        **{f"reward_{name.replace('-', '_')}": score for name, score in record.rewards.items()},
    }
    named = {f"evaluation/{record.set}/{name}": value for name, value in values.items()}
    return TrackedRow(RowKind.EVALUATION, step, record.at, cursor, _finite(named))


def event_row(event: Event, cursor: TrackCursor) -> TrackedRow:
    """One line of the event log."""
    text = f"{event.service} {event.phase}: {event.text}"[:TEXT_CHARACTERS]
    return TrackedRow(RowKind.EVENT, cursor.step, event.at, cursor, text=text)


def state_row(change: Transition, cursor: TrackCursor) -> TrackedRow:
    """A change of the run's state."""
    text = f"{change.state.value}: {change.reason}"[:TEXT_CHARACTERS]
    return TrackedRow(RowKind.STATE, cursor.step, change.at, cursor, text=text)


def rewind_row(step: int, at: float, cursor: TrackCursor) -> TrackedRow:
    """The steps after `step` have left the history."""
    after = cursor.model_copy(update={"step": step, "rewinds": cursor.rewinds + 1})
    text = f"rewound: the rollout steps after {step} left the run's history and are trained again"
    return TrackedRow(RowKind.REWIND, step, at, after, text=text)


def evaluated_step(record: EvaluationRecord, policy: CommittedPolicy | None) -> int:
    """The rollout step whose weights an evaluation scores."""
    if found := AT_STEP.fullmatch(record.name):
        return int(found["step"])
    if policy is None or record.name in (BEFORE, ALONE):
        return 0
    return policy.step if record.name == AFTER else policy.step_of(record.version)


Logged = StepRecord | EvaluationRecord | Event | Transition


def rows_after(
    cursor: TrackCursor, logged: Iterable[tuple[str, Logged]], policy: CommittedPolicy | None
) -> tuple[list[TrackedRow], TrackCursor]:
    """The rows of what was logged after `cursor`, in order of time, and the cursor after all of it.

    `logged`: with the ids of entries. A step that is not above the last one follows a rewind, which gets a row of its
    own. The tracker's own events get none: a report that a sink failed would be the next row for it.
    """
    rows: list[TrackedRow] = []
    for entry, record in logged:
        if isinstance(record, StepRecord):
            if record.step <= cursor.step:
                rows.append(rewind_row(record.step - 1, record.learning_started_at, cursor))
                cursor = rows[-1].cursor
            cursor = cursor.model_copy(update={"steps": entry, "step": record.step})
            rows.append(step_row(record, cursor))
        elif isinstance(record, EvaluationRecord):
            cursor = cursor.model_copy(update={"evaluations": entry})
            rows.append(evaluation_row(record, evaluated_step(record, policy), cursor))
        elif isinstance(record, Event):
            cursor = cursor.model_copy(update={"events": entry})
            if record.service != OWN_EVENTS:
                rows.append(event_row(record, cursor))
        else:
            cursor = cursor.model_copy(update={"states": cursor.states + 1})
            rows.append(state_row(record, cursor))
    return rows, cursor
