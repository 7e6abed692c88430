"""Owns what the controller shows of runs in the metrics: states, processes and those wanted, numbers of the recipe.

Must not act on what it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.contracts import COMMON_PHASES, PHASES, ProcessInfo, RunState
from services.metrics import EVENTS, PROCESSES, REPLICAS_WANTED, RUN_STATE, RUNS, SETTING, forget
from services.settings import Recipe, resource_requests
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecord

ENDED_SHOWN_S = 3600.0
"""How long a run that has ended shows its state: long enough for an alert to be sent and read."""
PROCESS_STATES = ("starting", "joining", "ready", "draining", "poisoned")


def show_runs(records: Iterable[RunRecord], now: float) -> None:
    """Show how many runs are in each state, and the state of each that lives or ended less than ENDED_SHOWN_S ago."""
    known = list(records)
    states = Counter(record.state for record in known)
    for state in RunState:
        RUNS.labels(state.value).set(states[state])
    shown = {
        record.id: record.state for record in known if not record.state.ended or now - _since(record) < ENDED_SHOWN_S
    }
    for run, state in shown.items():
        RUN_STATE.labels(run, state.value).set(1)
    for sample in next(iter(RUN_STATE.collect())).samples:
        run, is_in = sample.labels["run"], sample.labels["state"]
        if shown.get(run) != is_in:
            RUN_STATE.remove(run, is_in)


def _since(record: RunRecord) -> float:
    return record.history[-1].at if record.history else record.created_at


class RunFigures:
    """What is shown of one run while a keeper carries it; nothing once it is closed."""

    def __init__(self, run: str, event_log: EventLog) -> None:
        self._run = run
        self._event_log = event_log
        self._events_after = "0-0"

    async def open(self, recipe: Recipe) -> None:
        """Show the numbers of the recipe, and how often each event came so far."""
        # What came before is counted before anything is shown: to a rate, it is none of today's.
        before = await self._news()
        for service, phases in PHASES.items():
            for phase in (*COMMON_PHASES, *phases):
                EVENTS.labels(self._run, service, phase)
        self._count(before)
        for name, value in settings_shown(recipe).items():
            SETTING.labels(self._run, name).set(value)

    async def show(self, record: RunRecord, processes: Iterable[ProcessInfo]) -> None:
        """Show the run's live processes beside how many it wants, and what events have come.

        A process that dies tells of it in an event and is not scraped any more, so the controller counts for all.
        """
        self._count(await self._news())
        found = Counter((one.service, one.state) for one in processes)
        wanted = replicas_wanted(record)
        for service, count in wanted.items():
            REPLICAS_WANTED.labels(self._run, service).set(count)
            for state in PROCESS_STATES:
                PROCESSES.labels(self._run, service, state).set(found[service, state])

    async def _news(self) -> Counter[tuple[str, str]]:
        events = await self._event_log.events(self._events_after)
        self._events_after = events[-1][0] if events else self._events_after
        return Counter((event.service, event.phase) for _, event in events)

    def _count(self, news: Counter[tuple[str, str]]) -> None:
        for (service, phase), times in news.items():
            if phase in COMMON_PHASES or phase in PHASES.get(service, ()):
                EVENTS.labels(self._run, service, phase).inc(times)

    def close(self) -> None:
        """Show nothing more of the run but the state it is in."""
        forget(self._run)


def replicas_wanted(record: RunRecord) -> dict[str, int]:
    """By service: the processes that a run wants, now that its fleet may have been scaled."""
    booked = resource_requests(record.recipe, record.rollout_replicas)
    return {"sampler": 1} | {service: len(processes) for service, processes in booked.items() if processes}


def settings_shown(recipe: Recipe) -> dict[str, float]:
    """The numbers of a recipe that alerts and dashboards compare with, by their path in it."""
    limits, algorithm = recipe.limits, recipe.algorithm
    return {
        "algorithm.clip_high": algorithm.clip_high,
        "algorithm.clip_low": algorithm.clip_low,
        "algorithm.group_size": algorithm.group_size,
        "limits.groups_per_step": limits.groups_per_step,
        "limits.lease_s": limits.lease_s,
        "limits.max_inflight_groups": limits.max_inflight_groups,
        "limits.max_staleness": limits.max_staleness,
        "limits.rollout_steps": limits.rollout_steps,
        "rollout.max_new_tokens": recipe.rollout.max_new_tokens,
        "rollout.max_sequences": recipe.rollout.max_sequences,
        "weights.timeout_s": recipe.weights.timeout_s,
    }
