"""Owns what a run is charged for its processes while it is controlled, and the end of a run whose budget is spent.

Must not attribute what was charged to tokens; the readers of the ledger do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from services.contracts import ProcessInfo
from services.controller.retry import RunFailedError
from services.controller.run_context import RunContext
from services.settings import Recipe, ResourceRequest, resource_requests
from services.streams.runs.budget import spent_budget
from services.streams.runs.ledger import (
    BUSY,
    COST,
    CPU_MS,
    GPU_MS,
    IDLE,
    LedgerWriter,
    charged_field,
    read_ledger,
)
from services.streams.state.run_record import RunRecord

EVERY_S = 2.0
"""How often a run is charged; heartbeats are as frequent."""
LONGEST_GAP_S = 3600.0
"""The most that is charged at once. After a time without a controller, processes that live are charged for it, because
they held their devices; those that have died meanwhile are not."""
WORKING = ("ready", "draining")
"""States of a process that may be busy; before these it loads, or joins."""


class Accounts:
    """Charges one run. A process is charged what its recipe requests for it, whether it is busy or idle."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._last: float | None = None
        self._idle_s: dict[str, float] = {}  # by process: how much of its idle time is charged
        self._processes: list[ProcessInfo] = []
        self._shares: Mapping[str, ResourceRequest] = {}

    async def look(self, record: RunRecord, processes: list[ProcessInfo]) -> None:
        """Charge the run for its live processes, if EVERY_S have passed.

        Raises RunFailedError once its budget is spent; FencedError.
        """
        if self._last is not None and time.monotonic() - self._last < EVERY_S:
            return
        self._processes, self._shares = processes, _shares(record.recipe)
        await self._charge(record)
        ledger = await read_ledger(self._context.redis, self._context.keys)
        self._context.metrics.show_ledger(ledger)
        if reason := spent_budget(record.recipe.limits, ledger, self._context.prices):
            await self._context.event_log.write("budget-spent", reason)
            raise RunFailedError(reason)

    async def close(self, record: RunRecord, *, discard: bool) -> None:
        """Charge the run until its services have ended. `discard`: it succeeded, so nothing in flight is trained."""
        await self._charge(record, discard=discard)
        self._processes = []

    async def _charge(self, record: RunRecord, *, discard: bool = False) -> None:
        context, now, at = self._context, time.monotonic(), time.time()
        if self._last is None:
            before = (await read_ledger(context.redis, context.keys)).at
            passed_s = LONGEST_GAP_S if before is None else at - before
        else:
            passed_s = now - self._last
        writer = LedgerWriter(context.redis, context.keys, context.fence, record.project)
        await writer.charge(at, self._amounts(min(max(0.0, passed_s), LONGEST_GAP_S), at), discard=discard)
        self._last = now

    def _amounts(self, passed_s: float, at: float) -> Counter[str]:
        """What to charge by field, for the last `passed_s` seconds until `at`."""
        amounts: Counter[str] = Counter()
        charged, self._idle_s = self._idle_s, {}
        for process in self._processes:
            share = self._shares.get(process.service)
            if share is None:
                continue
            age_s = max(0.0, at - process.started_at)
            lived_s = min(passed_s, age_s)
            before_s = charged.get(process.id, _idle_before(process, lived_s, age_s))
            idle_s = _idle(process, before_s, lived_s)
            self._idle_s[process.id] = before_s + idle_s if process.state in WORKING else process.idle_s or 0.0
            for condition, seconds in ((BUSY, lived_s - idle_s), (IDLE, idle_s)):
                self._add(amounts, process.service, condition, seconds, share)
        return amounts

    def _add(self, amounts: Counter[str], service: str, condition: str, seconds: float, share: ResourceRequest) -> None:
        gpu_ms, cpu_ms = round(1000 * seconds * share.gpus), round(1000 * seconds * share.cpus)
        amounts[charged_field(service, condition, GPU_MS)] += gpu_ms
        amounts[charged_field(service, condition, CPU_MS)] += cpu_ms
        if prices := self._context.prices:
            amounts[charged_field(service, condition, COST, prices.currency)] += prices.cost(gpu_ms, cpu_ms)


def _shares(recipe: Recipe) -> Mapping[str, ResourceRequest]:
    """What one process of each service reserves; services that reserve nothing are not charged."""
    return {service: requests[0] for service, requests in resource_requests(recipe, 1).items() if requests}


def _idle_before(process: ProcessInfo, lived_s: float, age_s: float) -> float:
    """How long a process that was not seen before had been idle by the last account: its usual share of the time."""
    if process.idle_s is None or not age_s:
        return 0.0
    return process.idle_s * (age_s - lived_s) / age_s


def _idle(process: ProcessInfo, before_s: float, lived_s: float) -> float:
    """For how much of the last `lived_s` seconds a process was idle. What a late heartbeat adds counts next time."""
    if process.state not in WORKING:
        return lived_s
    if process.idle_s is None:  # of an older release: as it was at its last heartbeat
        return lived_s if process.waits and all(wait.idle for wait in process.waits) else 0.0
    return min(lived_s, max(0.0, process.idle_s - before_s))
