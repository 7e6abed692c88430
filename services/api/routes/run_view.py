"""Owns how a run is shown: its summary in a list, and its whole view.

Must not change a run.
"""

from __future__ import annotations

import time
from typing import Any

from services.api.routes.unknown_verdicts import last_views
from services.api.views.metrics import WaitView
from services.api.views.runs import RunSummary, RunView
from services.contracts import ProcessInfo, RunState
from services.settings.cluster_limits import role_requests
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.node_problems import node_problems
from services.streams.runs.places import avoided_places
from services.streams.runs.queue import read_queue
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import read_policy
from services.streams.state.run_record import RunRecord
from services.waits import describe_wait

EVENTS_SHOWN = 50
EVALUATIONS_SHOWN = 1000
UNKNOWN_SHOWN = 5


def summary_of(record: RunRecord) -> RunSummary:
    """A run as it stands in a list."""
    return RunSummary(**_summary(record))


def _summary(record: RunRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "project": record.project,
        "state": "unreadable" if "state" in record.damage else record.state,
        "reason": record.reason,
        "created_at": record.created_at,
        "rollout_replicas": record.rollout_replicas,
        "closing": record.closing,
        "cancel_requested": record.cancel_requested,
        "priority": record.priority,
        "problem": record.problem or None,
    }


def etag_of(record: RunRecord) -> str:
    """The weak entity tag of a run: of its record, not of what its processes write beside it."""
    return f'W/"{record.created_at!r}-{record.revision}"'


def matches_tag(header: str | None, tag: str) -> bool:
    """Whether a header If-Match or If-None-Match names an entity tag, weak or not, or any."""
    names = [name.strip().removeprefix("W/") for name in (header or "").split(",")]
    return "*" in names or tag.removeprefix("W/") in names


def waits_of(processes: list[ProcessInfo], now: float) -> list[WaitView]:
    """The waits of processes at `now` (Unix seconds), longest first."""
    found = [
        WaitView(
            process=process.id,
            service=process.service,
            seconds=max(0.0, now - wait.since),
            stalled=wait.stalled(now),
            **wait.model_dump(),
        )
        for process in processes
        for wait in process.waits
    ]
    return sorted(found, key=lambda view: view.seconds, reverse=True)


async def _alerts(redis: Redis, keys: RunKeys, record: RunRecord, processes: list[ProcessInfo]) -> list[str]:
    now = time.time()
    stalled = [
        describe_wait(process.id, wait, now) for process in processes for wait in process.waits if wait.stalled(now)
    ]
    starved: bytes | None = await redis.get(keys.starved)
    places = [] if record.state.ended else await _alerts_of_places(redis, keys, record, processes)
    return [*([starved.decode(errors="replace")] if starved else []), *places, *stalled]


async def _alerts_of_places(redis: Redis, keys: RunKeys, record: RunRecord, processes: list[ProcessInfo]) -> list[str]:
    """The places that the run avoids, with what its fleet has without them; nodes that cannot host its processes."""
    ready = sum(process.service == "rollout" and process.state == "ready" for process in processes)
    fleet = f"; {ready} of {record.rollout_replicas} replicas are ready"
    avoided = await avoided_places(redis, keys)
    problems = [] if record.problem else await node_problems(redis, role_requests(record.recipe, 1).keys())
    return [
        *(f"{place}{fleet if place.service == 'rollout' else ''}" for place in avoided),
        *(str(problem) for problem in problems),
    ]


async def view_of(redis: Redis, record: RunRecord) -> RunView:
    """All fields of a run, as far as this release can read them."""
    keys = RunKeys(record.id)
    event_log = EventLog(redis, keys, "api")
    policy = await read_policy(redis, keys)
    processes = await live_processes(redis, record.id)
    recipe = None if record.problem else record.recipe
    queue = await read_queue(redis) if record.state is RunState.QUEUED else []
    place = next((queued for queued in queue if queued.record.id == record.id), None)
    return RunView(
        **_summary(record),
        recipe=recipe or record.recipe_document,
        history=list(record.history),
        policy_version=policy.version if policy else None,
        rollout_steps=policy.step if policy else 0,
        rollout_steps_total=recipe.limits.rollout_steps if recipe else None,
        groups=await group_counts(redis, keys),
        processes=processes,
        events=await event_log.last_events(EVENTS_SHOWN),
        alerts=await _alerts(redis, keys, record, processes),
        unknown_verdicts=await last_views(redis, keys, UNKNOWN_SHOWN),
        evaluations=await event_log.last_evaluations(EVALUATIONS_SHOWN),
        export_path=record.export_path,
        summary=record.summary,
        pause_requested=record.pause_requested,
        resumptions=record.resumptions,
        resume_step=record.resume_step,
        files=dict(record.files),
        revision=record.revision,
        edits=list(record.edits),
        queue_position=place.position if place else None,
        waits_for=place.waits_for if place else None,
    )
