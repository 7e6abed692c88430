"""Owns the REST route that adopts a run whose record is gone.

Must not read a file itself.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from services.api.access.notes import note
from services.api.access.roles import ForbiddenError, Principal, Role
from services.api.access.settings import EVERY_PROJECT
from services.api.dependencies import Admin, PlatformOf
from services.api.guard.redis_deadline import without_redis
from services.api.routes.run_view import view_of
from services.api.views.requests import AdoptRequest
from services.api.views.runs import RunView
from services.settings import RecipeError
from services.settings.faults import invalid
from services.storage.places import SHARED_FOLDERS
from services.streams.keys import RunKeys
from services.streams.runs.adopting.adoption import adopt_run
from services.streams.runs.adopting.left import read_left
from services.streams.state.runs import RunRecords, UnknownRunError, UsedRunError

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("/adopt", status_code=201)
async def adopt_lost_run(platform: PlatformOf, principal: Admin, request: AdoptRequest, connection: Request) -> RunView:
    """Take over a run whose record Redis has lost, or that another platform ran, from its folder or the store.

    It is failed then, and can be resumed from its newest checkpoint. You must be an admin of the project that its files
    name, or of all if they name none. 409: a run with a history has the id.
    """
    _check_admin(principal, request.project, f"project {request.project!r}")
    if request.id in SHARED_FOLDERS:
        raise RecipeError(invalid("id", request.id, "another name; every run uses this folder"))
    try:
        RunKeys(request.id)
    except ValueError as error:
        raise RecipeError(str(error).removeprefix("run ")) from None
    note(run=request.id, project=request.project)
    platform.quotas.check_known(request.project)
    await _check_record(platform.records, principal, request.id)
    async with without_redis(connection):
        left = await asyncio.to_thread(read_left, request.id)
    owner = left.remains.facts.project
    _check_admin(principal, owner or EVERY_PROJECT, "the project whose run it was" if owner else "all projects")
    record = await adopt_run(
        platform.redis, request.id, left.remains, files=left.files, place=left.place, project=request.project
    )
    return await view_of(platform.redis, record)


def _check_admin(principal: Principal, project: str, where: str) -> None:
    if (principal.role_in(project) or 0) < Role.ADMIN:
        raise ForbiddenError(f"{principal.name} lacks the role: expected admin in {where}")


async def _check_record(records: RunRecords, principal: Principal, run: str) -> None:
    """A record that is left keeps its project. Raises ForbiddenError; UsedRunError if it is not visible."""
    try:
        project = (await records.shown(run)).project
    except UnknownRunError:
        return
    if principal.role_in(project) is None:
        raise UsedRunError(run)
    _check_admin(principal, project, f"project {project!r}")
