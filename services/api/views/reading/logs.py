"""Owns how the logs of a run's processes are shown.

Must not read Redis.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.streams.delivery.process_logs import LogLine, LogSource


class LogSourceView(LogSource):
    """A process with a log. `live`: it has a heartbeat."""

    live: bool


class LogList(BaseModel):
    """The processes of a run that have a log, the one that was written last at the end."""

    processes: list[LogSourceView]


class LogLineView(LogLine):
    """A line, without secrets; `id`: the cursor for `after` or Last-Event-ID."""

    id: str


class LogPage(BaseModel):
    """Lines of a process's log, oldest first. `next`: the cursor behind them; `more`: there is more behind it now."""

    lines: list[LogLineView]
    next: str
    more: bool
