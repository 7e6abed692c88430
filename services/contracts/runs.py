"""Owns a run's states, and what a live process publishes about itself.

Must not decide a transition; the controller does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

from services.contracts.base import Value

REWARD_DIGESTS = "digests.json"
"""The file that lists the user's files of a run, beside them in the run's folder: no other one may have its name."""


class RunState(StrEnum):
    """A run's life: queued -> starting -> running <-> paused -> succeeded | failed | cancelled.

    A run that failed or was cancelled may be resumed: it is requeued.
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
        """Whether the run has ended."""
        return self in RunState._ended()

    @classmethod
    def _ended(cls) -> frozenset[RunState]:
        return frozenset({cls.SUCCEEDED, cls.FAILED, cls.CANCELLED})


class RewardDigests(Value):
    """The files of the user's that a run was submitted with: SHA-256 (hexadecimal) of each one's UTF-8, by name."""

    files: dict[str, str]

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> RewardDigests:
        """Those of texts by name."""
        return cls(files={name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())})


class Closing(StrEnum):
    """Why an ended run can no longer be resumed.

    `deleting`: everything is deleted, the record last. `expiring`, then `expired`, after a time that the operator sets,
    and `archiving`, then `archived`, on request: what users read afterwards stays.
    """

    DELETING = "deleting"
    EXPIRING = "expiring"
    EXPIRED = "expired"
    ARCHIVING = "archiving"
    ARCHIVED = "archived"

    @property
    def open(self) -> bool:
        """Whether the controller has yet to delete something."""
        return self not in (Closing.EXPIRED, Closing.ARCHIVED)


class Transition(Value):
    """One change of a run's state: when (Unix seconds) and why."""

    state: RunState
    at: float
    reason: str


EditedValue: TypeAlias = int | float | str | None
"""A setting's value in an edit; None: no bound."""


class RunEdit(Value):
    """A change of a run's settings in flight: by whom, when (Unix seconds), after which committed rollout step.

    `changes`: by setting, such as `learner.learning_rate`, its value before and after. It counts from a later step on.
    """

    by: str
    at: float
    step: int
    changes: dict[str, tuple[EditedValue, EditedValue]]


class Wait(Value):
    """A wait of a process: its name, what exactly it waits for, its start (Unix seconds), its deadline in seconds.

    An `idle` wait is for work: its length is no fault of the process. A wait past its deadline is a stall.
    """

    name: str
    waits_for: str
    since: float
    deadline_s: float
    idle: bool = False

    def stalled(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now - self.since > self.deadline_s


HostPid: TypeAlias = tuple[str, int]
"""A process's host and its id there: process ids repeat from pod to pod."""


class ProcessInfo(Value):
    """A live process, as its heartbeat publishes it; `metrics` is host:port of its /metrics page.

    `library`: the Redis functions that it calls. `idle_s`: how long it has had nothing to do; None of older releases.
    """

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
    library: str = ""
    idle_s: float | None = None

    @property
    def host_pid(self) -> HostPid:
        """Identifies this process in the cluster."""
        return self.host, self.pid
