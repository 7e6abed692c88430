"""Owns how what went wrong is shown: errors of requests, dead letters, unknown verdicts.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.contracts import Cause, Lane


class UnknownView(BaseModel):
    """A verdict that is unknown, and why; `excerpt`: the last characters of the response."""

    entry: str
    at: float
    lane: Lane
    prompt: str | None
    group: str
    index: int
    reason: str
    excerpt: str


class DeadView(BaseModel):
    """A dead letter; `excerpt`: the first characters of its message, which has `size` bytes."""

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
