"""Owns the REST routes of ledgers: what a run used, and what all runs of a project used.

Must not charge anything; the controller does.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from services.api.access.settings import PROJECT
from services.api.dependencies import Platform, PlatformOf, ViewedRun, Viewer
from services.api.views.reading.ledger import PlatformLedger, PricesView, ProjectLedger, RunLedger
from services.streams.keys import RunKeys, run_list
from services.streams.runs.ledger import Ledger, ledger_projects, read_ledger, read_project_ledger
from services.streams.runs.uses import ledger_document

router = APIRouter(prefix="/v1", tags=["ledger"])


@router.get("/runs/{run}/ledger")
async def show_run_ledger(platform: PlatformOf, record: ViewedRun) -> RunLedger:
    """GPU time, response tokens and money of a run by use, until now; also of one that has ended."""
    ledger = await read_ledger(platform.redis, RunKeys(record.id))
    prices = platform.prices
    limits = None if record.problem else record.recipe.limits
    return RunLedger(
        run=record.id,
        project=record.project,
        prices=PricesView(gpu_hour=prices.gpu_hour, cpu_hour=prices.cpu_hour) if prices else None,
        budget=limits.budget if limits else None,
        gpu_hours_limit=limits.gpu_hours if limits else None,
        since=ledger.since,
        **_spent(platform, ledger),
    )


@router.get("/ledger")
async def show_ledger(
    platform: PlatformOf, principal: Viewer, project: Annotated[str | None, Query(pattern=PROJECT)] = None
) -> PlatformLedger:
    """GPU time, response tokens and money by project, of those that are visible to you; as of seconds ago."""
    known = [name for name in await ledger_projects(platform.redis) if project in (None, name)]
    return PlatformLedger(
        currency=platform.prices.currency if platform.prices else None,
        projects=[await _project(platform, name) for name in known if principal.role_in(name) is not None],
    )


async def _project(platform: Platform, project: str) -> ProjectLedger:
    ledger = await read_project_ledger(platform.redis, project)
    runs = int(await platform.redis.zcard(run_list(project)))
    return ProjectLedger(project=project, runs=runs, **_spent(platform, ledger))


def _spent(platform: Platform, ledger: Ledger) -> dict[str, Any]:
    currency = platform.prices.currency if platform.prices else None
    return {"closes": ledger.closes, **ledger_document(ledger, currency)}
