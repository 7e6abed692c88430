"""Owns the REST route that adopts a run whose record is gone.

Must not read a file itself.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from services.api.access.notes import note
from services.api.access.roles import ForbiddenError, Role
from services.api.dependencies import Admin, PlatformOf
from services.api.routes.run_view import view_of
from services.api.views.requests import AdoptRequest
from services.api.views.runs import RunView
from services.settings import RecipeError
from services.settings.faults import invalid
from services.storage.errors import StoreError
from services.storage.kept_files import read_kept_files
from services.storage.mirror import files_place, run_mirror
from services.storage.places import SHARED_FOLDERS, runs_folder
from services.streams.keys import RunKeys
from services.streams.runs.adoption import adopt_run
from services.streams.runs.remains import RunRemains, read_remains

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("/adopt", status_code=201)
async def adopt_lost_run(platform: PlatformOf, principal: Admin, request: AdoptRequest) -> RunView:
    """Take over a run whose record Redis has lost, or that another platform ran, from its folder or the store.

    It is failed then, and can be resumed from its newest checkpoint. 409: a run with a history has the id.
    """
    if (principal.role_in(request.project) or 0) < Role.ADMIN:
        raise ForbiddenError(f"{principal.name} lacks the role: expected admin in project {request.project!r}")
    if request.id in SHARED_FOLDERS:
        raise RecipeError(invalid("id", request.id, "another name; every run uses this folder"))
    try:
        RunKeys(request.id)
    except ValueError as error:
        raise RecipeError(str(error).removeprefix("run ")) from None
    note(run=request.id, project=request.project)
    platform.quotas.check_known(request.project)
    remains, files, place = await asyncio.to_thread(_found, request.id)
    record = await adopt_run(platform.redis, request.id, remains, files=files, place=place, project=request.project)
    return await view_of(platform.redis, record)


def _found(run: str) -> tuple[RunRemains, dict[str, str], str]:
    runs, mirror = runs_folder(), run_mirror(run)
    try:
        remains = read_remains(runs / run, mirror, run)
        return remains, read_kept_files(runs / run, mirror), files_place(runs)
    except OSError as error:
        raise StoreError(f"{runs / run}: cannot be read ({error.strerror})") from None
