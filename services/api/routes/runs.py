"""Owns the REST routes that read runs: the list, one run, its metrics and waits.

Must not change a run.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from services.api.dependencies import PlatformOf, ViewedRun, Viewer
from services.api.routes.run_view import etag_of, matches_tag, summary_of, view_of, waits_of
from services.api.views.metrics import MetricsView, StepView, WaitView
from services.api.views.runs import RunList, RunView
from services.contracts import RunState
from services.streams.keys import RunKeys
from services.streams.runs.lists import Cursor, RunFilter, RunLists
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import live_processes

Step = Annotated[str, Query(pattern=r"^[0-9]{1,15}(-[0-9]{1,15})?$")]

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.get("")
async def list_runs(
    platform: PlatformOf,
    principal: Viewer,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    after: Annotated[str | None, Query(description="the `next` of the previous page")] = None,
    state: Annotated[list[RunState] | None, Query(description="may be repeated")] = None,
    project: str | None = None,
    name: Annotated[str, Query(max_length=96, description="a part of the id")] = "",
    archived: Annotated[bool | None, Query(description="whether they have expired, or are archived or deleted")] = None,
) -> RunList:
    """Runs of the projects that are visible to you, the newest first."""
    visible = None if principal.sees_all else frozenset(principal.roles)
    projects = visible if project is None else frozenset({project} if principal.role_in(project) else ())
    wanted = RunFilter(projects, frozenset(state or ()), archived, name)
    page = await RunLists(platform.redis).page(wanted, limit, Cursor.parse(after) if after else None)
    return RunList(runs=[summary_of(record) for record in page.records], next=str(page.next) if page.next else None)


@router.get("/{run}", responses={304: {"description": "it has ended, and is as it was"}})
async def show_run(
    platform: PlatformOf,
    record: ViewedRun,
    response: Response,
    if_none_match: Annotated[str | None, Header()] = None,
) -> RunView:
    """One run: state, counters, processes, events, alerts, evaluations.

    The entity tag is that of the run's record. What a run's processes write changes without it, so only a run that has
    ended is answered as not modified.
    """
    tag = {"ETag": etag_of(record)}
    if record.state.ended and not record.active and matches_tag(if_none_match, tag["ETag"]):
        return Response(status_code=304, headers=tag)  # type: ignore[return-value]  # no body, so no model
    response.headers.update(tag)
    return await view_of(platform.redis, record)


@router.get("/{run}/metrics")
async def list_steps(
    platform: PlatformOf,
    record: ViewedRun,
    after: Annotated[str, Query(pattern=r"^[0-9]{1,15}(-[0-9]{1,15})?$")] = "0-0",
) -> MetricsView:
    """The run's time series after the step whose id is `after`."""
    steps = await EventLog(platform.redis, RunKeys(record.id), "api").steps(after)
    return MetricsView(steps=[StepView(id=entry, **step.model_dump()) for entry, step in steps])


@router.get("/{run}/waits")
async def list_waits(platform: PlatformOf, record: ViewedRun) -> list[WaitView]:
    """The waits of the run's live processes, longest first. A process that hangs disappears after 10 s."""
    return waits_of(await live_processes(platform.redis, record.id), time.time())
