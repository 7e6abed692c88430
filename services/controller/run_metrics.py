"""Owns the controller's metrics of runs: their states, live and desired processes, numbers of the recipe.

Must not act on what it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from services.contracts import COMMON_PHASES, PHASES, ProcessInfo, RunState
from services.controller.ended.known_runs import EndedRuns
from services.metrics import (
    COST,
    EVENTS,
    GPU_SECONDS,
    LEDGER_TOKENS,
    PROCESSES,
    REPLICAS_DESIRED,
    RUN_STATE,
    RUNS,
    forget,
)
from services.metrics.tables import SETTINGS
from services.settings import Recipe, resource_requests
from services.settings.operator.prices import NANO
from services.streams.runs.ledger import COST as MONEY
from services.streams.runs.ledger import Ledger
from services.streams.runs.places import AVOIDED
from services.streams.runs.uses import rows_of
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord

PROCESS_STATES = ("starting", "joining", "ready", "draining", "poisoned", AVOIDED)


class RunStates:
    """The metrics of all runs: how many are in each state, and the state of each active or recently ended run.

    A run that has ended shows its state long enough for an alert to be sent and read; see RECENT_S.
    """

    def __init__(self) -> None:
        self._shown: dict[str, RunState] = {}

    def show(self, active: Iterable[RunRecord], ended: EndedRuns) -> None:
        """Show them as they are now; only what has changed costs anything."""
        records = list(active)
        states = Counter(record.state for record in records if not record.state.ended)
        shown = {**ended.recent, **{record.id: record.state for record in records}}
        for state in RunState:
            RUNS.labels(state.value).set(states[state] + ended.states.get(state, 0))
        for run, state in self._shown.items() - shown.items():
            RUN_STATE.remove(run, state.value)
        for run, state in shown.items() - self._shown.items():
            RUN_STATE.labels(run, state.value).set(1)
        self._shown = shown


class RunMetrics:
    """The metrics of one run while it is controlled; none once closed."""

    def __init__(self, run: str, event_log: EventLog) -> None:
        self._run = run
        self._event_log = event_log
        self._events_after = "0-0"
        self._recipe: Recipe | None = None

    async def open(self, recipe: Recipe) -> None:
        """Show the numbers of the recipe, and how often each event was written so far."""
        # Earlier events are counted before anything is shown, so that a rate does not count them as new.
        before = await self._new_events()
        for service, phases in PHASES.items():
            for phase in (*COMMON_PHASES, *phases):
                EVENTS.labels(self._run, service, phase)
        self._count(before)
        self._show_settings(recipe)

    def _show_settings(self, recipe: Recipe) -> None:
        self._recipe = recipe
        for path, family in SETTINGS.items():
            if (value := attrgetter(path)(recipe)) is not None:
                family.labels(self._run).set(value)

    async def show(self, record: RunRecord, processes: Iterable[ProcessInfo]) -> None:
        """Show the run's live processes, how many it should have, and its new events.

        A process that dies reports it in an event and is no longer scraped, so the controller counts the events of all
        processes.
        """
        self._count(await self._new_events())
        if record.recipe is not self._recipe:  # it was edited
            self._show_settings(record.recipe)
        found = Counter((process.service, process.state) for process in processes)
        desired = replicas_desired(record)
        for service, count in desired.items():
            REPLICAS_DESIRED.labels(self._run, service).set(count)
            for state in PROCESS_STATES:
                PROCESSES.labels(self._run, service, state).set(found[service, state])

    def show_ledger(self, ledger: Ledger) -> None:
        """Show what the run was charged, and the uses of its tokens."""
        for row in rows_of(ledger, None):
            LEDGER_TOKENS.labels(self._run, row.use).set(row.tokens)
            GPU_SECONDS.labels(self._run, row.use).set(row.gpu_ms / 1000)
        for currency in ledger.currencies:
            COST.labels(self._run, currency).set(ledger.total(MONEY, currency) / NANO)

    async def _new_events(self) -> Counter[tuple[str, str]]:
        events = await self._event_log.events(self._events_after)
        self._events_after = events[-1][0] if events else self._events_after
        return Counter((event.service, event.phase) for _, event in events)

    def _count(self, new: Counter[tuple[str, str]]) -> None:
        for (service, phase), times in new.items():
            if phase in COMMON_PHASES or phase in PHASES.get(service, ()):
                EVENTS.labels(self._run, service, phase).inc(times)

    def close(self) -> None:
        """Remove the run's metrics, except its state."""
        forget(self._run)


def replicas_desired(record: RunRecord) -> dict[str, int]:
    """By service: the number of processes that a run should have, after its fleet may have been scaled."""
    requests = resource_requests(record.recipe, record.rollout_replicas)
    return {"sampler": 1} | {service: len(processes) for service, processes in requests.items() if processes}
