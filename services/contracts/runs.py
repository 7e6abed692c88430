"""Owns a run's states and what a live process tells of itself.

Must not decide a transition; the controller does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from services.contracts.base import Value


class RunState(StrEnum):
    """A run's life: queued -> starting -> running <-> paused -> succeeded | failed | cancelled.

    A run that failed or was cancelled may be resumed: it is queued again.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether no further change can follow."""
        return self in RunState._ended()

    @classmethod
    def _ended(cls) -> frozenset[RunState]:
        return frozenset({cls.SUCCEEDED, cls.FAILED, cls.CANCELLED})


class Transition(Value):
    """One change of a run's state: when (Unix seconds) and why."""

    state: RunState
    at: float
    reason: str


class Wait(Value):
    """Something that a process waits for: its name, what exactly, since when (Unix seconds), for how long at most.

    An `idle` wait is for work: that it lasts is no fault of the one who waits. One past its deadline is a stall.
    """

    name: str
    waits_for: str
    since: float
    deadline_s: float
    idle: bool = False

    def stalled(self, now: float) -> bool:
        """Whether the deadline is over."""
        return now - self.since > self.deadline_s


HostPid: TypeAlias = tuple[str, int]
"""Where a process lives and its id there: process ids repeat from pod to pod."""


class ProcessInfo(Value):
    """A live process as it announces itself; `metrics` is host:port of its /metrics page."""

    id: str
    service: str
    run: str | None
    host: str
    pid: int
    metrics: str
    state: str = "starting"
    version: int | None = None
    workers: int = 1
    started_at: float = 0.0
    waits: tuple[Wait, ...] = ()

    @property
    def host_pid(self) -> HostPid:
        """What tells this process from all others of the cluster."""
        return self.host, self.pid
