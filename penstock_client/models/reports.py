"""Owns the models of what happened in a run: its story, dead letters, unknown verdicts.

Must not trust a text, which a model may have written.
"""

from __future__ import annotations

from typing import Any

from penstock_client.models.base import ApiModel


class RunHappening(ApiModel):
    """Something in a run: a line of its log, a change of state, a rollout step, an evaluation, by its `kind`.

    `id`: the cursor of those behind it. `data`: as the API shows such a thing elsewhere.
    """

    id: str
    at: float
    kind: str
    data: dict[str, Any]


class RunStory(ApiModel):
    """What happened in a run, oldest first; `next`: the cursor behind it. `ended`: nothing follows."""

    events: list[RunHappening]
    next: str
    more: bool = False
    ended: bool = False


class ProcessLog(ApiModel):
    """A process with a log. `last_at`: when it was last written; `dropped`: lines that only its file has."""

    process: str
    service: str = ""
    host: str = ""
    started_at: float = 0.0
    last_at: float = 0.0
    dropped: int = 0
    live: bool = False


class ProcessLogs(ApiModel):
    """The processes of a run that have a log."""

    processes: list[ProcessLog]


class ProcessLogLine(ApiModel):
    """A line of a log, and the cursor of those behind it."""

    id: str
    at: float
    level: str = ""
    text: str


class ProcessLogPage(ApiModel):
    """Lines of a log, oldest first; `next`: the cursor behind them."""

    lines: list[ProcessLogLine]
    next: str
    more: bool = False


class DeadLetterEntry(ApiModel):
    """A dead letter, and why; its texts may come from anywhere."""

    entry: str
    at: float = 0.0
    stream: str = ""
    cause: str = ""
    reason: str = ""
    group: str | None = None


class UnknownVerdictEntry(ApiModel):
    """A verdict that is unknown, and why; `excerpt`: the end of the response, which a model wrote."""

    entry: str
    at: float = 0.0
    prompt: str | None = None
    group: str = ""
    index: int = 0
    reason: str = ""
    excerpt: str = ""
