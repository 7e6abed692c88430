"""Owns the REST routes that archive and delete runs that have ended, one or many.

Must not delete anything; the controller does.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from services.api.access.roles import Principal, Role
from services.api.dependencies import Admin, OperatedRun, OwnedRun, Platform, PlatformOf
from services.api.routes.run_view import summary_of
from services.api.views.endings import ClosedList, RefusedRun
from services.api.views.runs import RunSummary
from services.contracts import Closing, RunState
from services.settings import RecipeError
from services.settings.faults import invalid
from services.storage.places import SHARED_FOLDERS
from services.streams.runs.many import RunSelection, close_runs
from services.streams.state.ended.closing import check_left, close_run
from services.streams.state.run_record import RunRecord

OlderThan = Annotated[float, Query(ge=0, le=1e10, allow_inf_nan=False, description="seconds since the run's end")]
States = Annotated[list[RunState] | None, Query(description="may be repeated; by default all ended runs")]
Project = Annotated[str | None, Query(description="by default all projects whose admin you are")]
DryRun = Annotated[bool, Query(description="only answer which runs these are")]

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("/archive", status_code=202)
async def archive_runs(
    platform: PlatformOf,
    principal: Admin,
    older_than: OlderThan,
    state: States = None,
    project: Project = None,
    dry_run: DryRun = False,
) -> ClosedList:
    """Archive runs that ended some time ago, the oldest ends first, at most 200 of them; see the route of one run."""
    return await _close(platform, principal, Closing.ARCHIVING, older_than, state, project, dry_run=dry_run)


@router.post("/{run}/archive", status_code=202)
async def archive_run(platform: PlatformOf, record: OperatedRun) -> RunSummary:
    """Free the memory of a run that has ended; it can no longer be resumed.

    Its record, step records, evaluations, events, dead letters, unknown verdicts and counters stay, as do its files.
    """
    return summary_of(await close_run(platform.redis, record.id, Closing.ARCHIVING))


@router.delete("", status_code=202)
async def delete_runs(
    platform: PlatformOf,
    principal: Admin,
    older_than: OlderThan,
    state: States = None,
    project: Project = None,
    files: bool = False,
    dry_run: DryRun = False,
) -> ClosedList:
    """Delete runs that ended some time ago, the oldest ends first, at most 200 of them; see the route of one run."""
    return await _close(platform, principal, Closing.DELETING, older_than, state, project, files=files, dry_run=dry_run)


@router.delete("/{run}", status_code=202)
async def delete_run(platform: PlatformOf, record: OwnedRun, files: bool = False) -> RunSummary:
    """Delete a run that has ended: all that Redis holds of it, and with `files` its files in the store and folder.

    The controller does it; the run is unknown (404) once nothing is left.
    """
    if files and record.id in SHARED_FOLDERS:
        raise RecipeError(invalid("files", files, f"false; every run uses the folder {record.id}"))
    if record.state.ended:
        await check_left(platform.redis, record.id)
    return summary_of(await close_run(platform.redis, record.id, Closing.DELETING, files=files))


async def _close(
    platform: Platform,
    principal: Principal,
    closing: Closing,
    older_than: float,
    states: list[RunState] | None,
    project: str | None,
    *,
    files: bool = False,
    dry_run: bool,
) -> ClosedList:
    def admitted(record: RunRecord) -> bool:
        owned = (principal.role_in(record.project) or 0) >= Role.ADMIN
        return owned and project in (None, record.project) and not (files and record.id in SHARED_FOLDERS)

    wanted = RunSelection(older_than, frozenset(states or ()), admitted)
    found = await close_runs(platform.redis, closing, wanted, files=files, dry_run=dry_run)
    return ClosedList(
        runs=[summary_of(record) for record in found.runs],
        refused=[RefusedRun(id=run, reason=reason) for run, reason in found.refused.items()],
        more=found.more,
        dry_run=dry_run,
    )
