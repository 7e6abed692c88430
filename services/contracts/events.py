"""Owns messages for users: events, dead letters, and verdicts that are unknown.

Must not be needed to train.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from services.contracts.base import Count, Finite, Lane, Message

COMMON_PHASES = ("node-avoided", "service-failed", "stalled", "waiting")
"""Phases of events that any service of a run may write."""
PHASES: dict[str, tuple[str, ...]] = {
    "api": ("edited", "redis-memory-planned"),
    "controller": (
        "adopted",
        "archived",
        "budget-spent",
        "closing-failed",
        "downloaded",
        "expired",
        "learner-restarted",
        "look-failed",
        "model-prepared",
        "paused",
        "preparing-model",
        "queued",
        "restart-failed",
        "resumed",
        "reward-file-differs",
        "reward-files-kept",
        "sampler-restarted",
        "scaling",
        "scaling-failed",
        "service-ready",
        "starting-services",
        "summary-not-stored",
        "tuning",
    ),
    "sampler": (
        "archive-failed",
        "archive-incomplete",
        "archive-resumed",
        "batch-lost",
        "data-loaded",
        "evaluating",
        "evaluation-skipped",
        "evaluation-unknown",
        "group-dead",
        "group-orphaned",
        "group-restored",
        "groups-withdrawn",
        "prompt-refused",
        "prompt-too-long",
        "prompt-unjudgeable",
        "prompts-withdrawn",
        "redis-memory-freed",
        "redis-memory-partial",
        "redis-memory-short",
        "redis-memory-single",
        "rewound",
        "starvation-boundary",
        "starvation-over",
        "starvation-partial",
        "starvation-pause",
        "starvation-widen",
        "verdicts-unknown",
    ),
    "rollout": ("partial-damaged", "rollout-joining"),
    "verifier": ("unconfined",),
    "learner": (
        "archive-differs",
        "awaiting-evaluation",
        "checkpoint",
        "checkpoint-damaged",
        "checkpoint-failed",
        "exported",
        "logprobs-differ",
        "non-finite-gradient",
        "payload-damaged",
        "rate-edited",
        "ready",
        "retrained-differs",
        "starting",
        "weight-sync-failed",
        "weights-late",
    ),
    "tracker": ("tracking-failed", "tracking-started"),
}
"""By service: the other phases of its events."""


class Event(Message):
    """Any service -> users: one line of the run's event log. `phase`: one of PHASES or COMMON_PHASES."""

    kind: Literal["event"] = "event"
    service: str
    phase: str
    text: str
    at: float


class Cause(StrEnum):
    """Why a message was dead-lettered. `refused`: by the chat template."""

    TOO_LONG = "too-long"
    REFUSED = "refused"
    DELIVERIES = "deliveries"
    INVALID = "invalid"
    UNSTATED = "unstated"


PROMPT_FAULTS = (Cause.TOO_LONG, Cause.REFUSED)
"""Causes that are faults of the prompt: every further draw would fail in the same way."""
UNJUDGEABLE = "unjudgeable"
DROP_CAUSES = (*(cause.value for cause in PROMPT_FAULTS), UNJUDGEABLE)
"""Why a training prompt is never drawn again: a fault of its task's dead letter, or that no verifier can judge it."""


class DeadLetter(Message):
    """consumer -> sampler and users: a dead-lettered message, with the reason; `prompt` is the id of a task's prompt.

    `size`: of the message, in bytes; `body` may be cut short. `at`: Unix seconds.
    """

    kind: Literal["dead"] = "dead"
    stream: str
    entry: str
    reason: str
    deliveries: int
    cause: Cause = Cause.UNSTATED
    group: str | None = None
    prompt: str | None = None
    body: str
    size: int = 0
    at: float = 0.0


class UnknownVerdict(Message):
    """verifier -> users: a response without a verdict, and why; `prompt` is the id of its prompt, if it was known.

    `excerpt`: the end of the response. `at`: Unix seconds.
    """

    kind: Literal["unknown-verdict"] = "unknown-verdict"
    lane: Lane
    group: str
    index: Count
    prompt: str | None = None
    reason: str
    excerpt: str = ""
    at: Finite


class RowFunctions(Message):
    """sampler -> verifier: the user's functions that rows of the data name beyond the recipe's own rewards."""

    kind: Literal["row-functions"] = "row-functions"
    functions: tuple[str, ...]
