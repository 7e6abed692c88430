"""Owns what the parts of a run's controller share: its connections, its record, and how its services are stopped.

Must not decide what happens to the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from services.contracts import UNOWNED, Fence, RunState
from services.controller.cluster import Cluster
from services.controller.run_metrics import RunMetrics
from services.settings import Prices
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import OWNER, RunRecords
from services.waits import Waits

PERIOD_S = 0.5
"""How often a run's record and processes are checked."""
STOP_DEADLINE_S = 12.0
STOPPING_S = 2 * STOP_DEADLINE_S
FLEET_WAIT, PROGRESS_WAIT = "fleet", "progress"
"""Names of the waits that end when the run's services stop: for missing replicas, and for progress."""


class RunCancelledError(RuntimeError):
    """The run was cancelled by a request."""


class ControllerStoppingError(RuntimeError):
    """The controller stops; the run's services stop too, and its record stays for the next controller."""


@dataclass
class RunContext:
    """One run, as every part of its controller sees it.

    `folder`: the run's folder; `fence`: the controller's; `prices`: the platform's.
    """

    redis: Redis
    records: RunRecords
    cluster: Cluster
    folder: Path
    run: str
    stopping: asyncio.Event
    fence: Fence = UNOWNED
    prices: Prices | None = None
    keys: RunKeys = field(init=False)
    event_log: EventLog = field(init=False)
    metrics: RunMetrics = field(init=False)
    waits: Waits = field(init=False, default_factory=Waits)

    def __post_init__(self) -> None:
        self.keys = RunKeys(self.run)
        self.event_log = EventLog(self.redis, self.keys, OWNER)
        self.metrics = RunMetrics(self.run, self.event_log)

    async def current(self) -> RunRecord:
        """The run's record as it is now.

        Raises ControllerStoppingError, RunCancelledError; FencedError when another controller owns the run;
        UnknownRunError when Redis has lost it.
        """
        if self.stopping.is_set():
            raise ControllerStoppingError
        record = await self.records.get(self.run, self.fence)
        if record.cancel_requested:
            raise RunCancelledError
        return record

    async def change(self, state: RunState, reason: str) -> None:
        """Set the run's state. Raises FencedError when another controller owns the run."""
        await self.records.transition(self.run, state, reason, self.fence)

    async def stop_services(self) -> None:
        """Drain and stop all services of the run."""
        for name in (PROGRESS_WAIT, FLEET_WAIT):
            self.waits.done(name)
        with self.waits.on("stopping", "the run's services to drain and stop", STOPPING_S):
            await self.cluster.stop(self.run, STOP_DEADLINE_S)
