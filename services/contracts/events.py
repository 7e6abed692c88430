"""Owns what is written down for people: events, and messages that were given up.

Must not be needed to train.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from services.contracts.base import Message

COMMON_PHASES = ("service-failed", "stalled", "waiting")
"""Words of events that any service of a run may write."""
PHASES: dict[str, tuple[str, ...]] = {
    "controller": (
        "learner-restarted", "look-failed", "paused", "preparing-model", "queued", "restart-failed", "resumed",
        "sampler-restarted", "scaling", "scaling-failed", "service-ready", "starting-services", "summary-not-stored",
    ),
    "sampler": (
        "batch-lost", "data-loaded", "evaluating", "evaluation-skipped", "evaluation-unknown", "group-dead",
        "group-orphaned", "prompt-refused", "prompt-too-long", "redis-memory-freed", "redis-memory-short", "rewound",
        "starvation-boundary", "starvation-over", "starvation-partial", "starvation-pause", "starvation-widen",
    ),
    "rollout": ("rollout-joining",),
    "verifier": ("unconfined",),
    "learner": (
        "awaiting-evaluation", "batch-repaired", "batch-too-old", "checkpoint", "checkpoint-damaged",
        "checkpoint-failed", "exported", "non-finite-gradient", "payload-damaged", "ready", "starting",
        "weight-sync-failed", "weights-late",
    ),
    "api": ("redriven",),
}  # fmt: skip
"""By service: the other words of its events."""


class Event(Message):
    """Any service -> people: something worth a line in the run's log. `phase`: one of PHASES or COMMON_PHASES."""

    kind: Literal["event"] = "event"
    service: str
    phase: str
    text: str
    at: float


class Cause(StrEnum):
    """Why a message was given up. `too-long` and `refused` (by the chat template) are faults of the prompt itself."""

    TOO_LONG = "too-long"
    REFUSED = "refused"
    DELIVERIES = "deliveries"
    INVALID = "invalid"
    UNSTATED = "unstated"


class DeadLetter(Message):
    """A consumer -> sampler and people: a message given up, with the reason; `prompt` is the id of a task's prompt.

    `size` is the message's, in bytes; `body` may be cut short, and is then no longer fit to be delivered again. `at`:
    when (Unix seconds).
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

    @property
    def whole(self) -> bool:
        """Whether `body` is the message as it was, so that it can be delivered again."""
        return self.size == len(self.body.encode())
