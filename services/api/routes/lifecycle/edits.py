"""Owns the REST routes that change a run's settings in flight.

Must not apply a change; the run's services do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from services.api.access.roles import Principal
from services.api.dependencies import OperatedRun, Platform, PlatformOf, PrincipalOf
from services.api.routes.lifecycle.accepting import accepted, check_replicas, check_verifiers
from services.api.routes.run_view import etag_of, matches_tag, view_of
from services.api.views.edits import EditRequest
from services.api.views.requests import ScaleRequest
from services.api.views.runs import AcceptedRun, RunView
from services.settings import RecipeError
from services.streams.keys import RunKeys
from services.streams.memory_plan import compare_plan
from services.streams.runs.budget import budget_faults
from services.streams.runs.edits import BUDGET, ROLLOUT, TUNING, VERIFIERS, Edited, check_edit, edit_run
from services.streams.state.events import EventLog
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import ACTIVE, EndedRunError, StaleRevisionError

ATTEMPTS = 5
"""Of an edit without If-Match, while others change the run."""
IfMatch = Annotated[str | None, Header(description="the entity tag of the run as you know it")]

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.patch("/{run}", status_code=202)
async def edit_run_settings(
    platform: PlatformOf,
    principal: PrincipalOf,
    record: OperatedRun,
    request: EditRequest,
    response: Response,
    if_match: IfMatch = None,
) -> AcceptedRun:
    """Change settings of a run that continues, or will be resumed; all others keep their value.

    The recipe as a whole must stay valid, and its plan below Redis' maxmemory. The answer to a setting that cannot
    change (422) lists those that can. 412: the run was changed since the entity tag was read.
    """
    wanted = request.model_dump(by_alias=True, exclude_unset=True)
    changed, warnings = await _edit(platform, principal, record, wanted, if_match)
    response.headers["ETag"] = etag_of(changed)
    return await accepted(platform.redis, changed, warnings)


@router.patch("/{run}/scale", status_code=202)
async def scale_run(
    platform: PlatformOf, principal: PrincipalOf, record: OperatedRun, request: ScaleRequest
) -> RunView:
    """Change the number of rollout or verifier replicas while the run continues, within the cluster's limits."""
    if record.state not in ACTIVE:
        raise EndedRunError(f"run {record.id!r} has ended: it is {record.state.value}")
    if not request.model_fields_set:
        raise RecipeError("rollout: missing: expected a number of replicas for rollout, verifier or both")
    wanted = {}
    for field, setting, check in (("rollout", ROLLOUT, check_replicas), ("verifier", VERIFIERS, check_verifiers)):
        if field in request.model_fields_set:
            wanted[setting] = getattr(request, field)
            check(record.recipe, field, wanted[setting])
    changed, _ = await _edit(platform, principal, record, wanted, None)
    return await view_of(platform.redis, changed)


async def _edit(
    platform: Platform, principal: Principal, record: RunRecord, wanted: Mapping[str, Any], if_match: str | None
) -> tuple[RunRecord, list[str]]:
    """The record after an edit, and what to warn of. Raises StaleRevisionError, RecipeError, QuotaError."""
    for attempt in range(1, ATTEMPTS + 1):
        if if_match is not None and not matches_tag(if_match, etag_of(record)):
            raise StaleRevisionError(record.id)
        edited = check_edit(record, wanted)
        if not edited.changes:
            return record, []
        try:
            return await _checked_edit(platform, principal, record, edited)
        except StaleRevisionError:
            if attempt == ATTEMPTS:
                raise
            record = await platform.records.get(record.id)
    raise AssertionError("the last attempt returns or raises")


async def _checked_edit(
    platform: Platform, principal: Principal, record: RunRecord, edited: Edited
) -> tuple[RunRecord, list[str]]:
    for setting, check in ((ROLLOUT, check_replicas), (VERIFIERS, check_verifiers)):
        if setting in edited.changes:
            check(record.recipe, setting, int(edited.changes[setting][1] or 0))
    if BUDGET in edited.changes and (faults := budget_faults(edited.recipe.limits, platform.prices)):
        raise RecipeError("\n".join(faults))
    grows = edited.recipe.limits != record.recipe.limits or TUNING in edited.changes
    warnings = await compare_plan(platform.redis, platform.records, record.id, edited.recipe) if grows else []
    if grows or ROLLOUT in edited.changes:
        async with platform.quotas.room_for(record.project, edited.recipe, edited.rollout_replicas, record.id):
            changed = await edit_run(platform.redis, record, edited, principal.name)
    else:
        changed = await edit_run(platform.redis, record, edited, principal.name)
    text = f"{edited.text} by {principal.name}, after rollout step {changed.edits[-1].step}"
    await EventLog(platform.redis, RunKeys(record.id), "api").write("edited", text)
    return changed, warnings
