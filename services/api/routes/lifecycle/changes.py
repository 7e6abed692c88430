"""Owns the REST routes that change a run's course: pause, resume, cancel.

Must not act on a run; it changes the record, the controller acts.
"""

from __future__ import annotations

from fastapi import APIRouter

from services.api.dependencies import OperatedRun, Platform, PlatformOf
from services.api.routes.lifecycle.accepting import accepted, check_replicas
from services.api.routes.run_view import view_of
from services.api.views.requests import ResumeRequest
from services.api.views.runs import AcceptedRun, RunView
from services.settings import Recipe, RecipeError, load_cluster_limits
from services.streams.keys import RunKeys
from services.streams.memory_plan import compare_plan
from services.streams.runs.budget import spent_budget
from services.streams.runs.ledger import read_ledger
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RESUMABLE, UNCHANGED, ResumeChanges, RunStateError

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("/{run}/cancel", status_code=202)
async def cancel_run(platform: PlatformOf, record: OperatedRun) -> RunView:
    """Cancel a run; it is `cancelled` once none of its processes runs."""
    return await view_of(platform.redis, await platform.records.request_cancel(record.id))


@router.post("/{run}/pause", status_code=202)
async def pause_run(platform: PlatformOf, record: OperatedRun) -> RunView:
    """Pause a running run: its processes stay, and no new groups are dispatched."""
    return await view_of(platform.redis, await platform.records.request_pause(record.id))


@router.post("/{run}/resume", status_code=202)
async def resume_run(platform: PlatformOf, record: OperatedRun, request: ResumeRequest | None = None) -> AcceptedRun:
    """Resume a paused run, or requeue a run that failed or was cancelled, unless its plan is above maxmemory."""
    return await _resume(platform, record.id, request)


def _check_ranks(recipe: Recipe, ranks: int) -> None:
    """Raises RecipeError for what is impossible only with so many ranks; what was accepted before stays accepted."""
    changed = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"ranks": ranks})})
    # By field, because the texts name the number of ranks.
    before = {fault.partition(":")[0] for fault in recipe.device_faults}
    if faults := [fault for fault in changed.device_faults if fault.partition(":")[0] not in before]:
        raise RecipeError("\n".join(faults))
    limits = load_cluster_limits()
    if limits and (faults := [fault for fault in limits.size_faults(changed) if fault.startswith("learner.ranks:")]):
        raise RecipeError("\n".join(faults))


async def _check_budget(platform: Platform, record: RunRecord) -> None:
    """Raises RunStateError while a budget of the run is spent: it would fail at once."""
    ledger = await read_ledger(platform.redis, RunKeys(record.id))
    if spent := spent_budget(record.recipe.limits, ledger, platform.prices):
        hint = f"raise it first (PATCH /v1/runs/{record.id})"
        raise RunStateError(f"run {record.id!r} cannot be resumed: {spent}; {hint}")


async def _resume(platform: Platform, run: str, request: ResumeRequest | None) -> AcceptedRun:
    redis, records = platform.redis, platform.records
    record = await records.get(run)
    if request and request.rollout is not None:
        check_replicas(record.recipe, "rollout", request.rollout)
    if request and request.learner_ranks is not None:
        _check_ranks(record.recipe, request.learner_ranks)
    requeued = record.state in RESUMABLE and not record.closing
    if requeued and (faults := record.recipe.sampling_faults):
        raise RecipeError("\n".join(faults))
    if requeued:
        await _check_budget(platform, record)
    warnings = await compare_plan(redis, records, run, record.recipe) if requeued else []
    changes = ResumeChanges(**request.model_dump()) if request else UNCHANGED
    if not requeued:
        return await accepted(redis, await records.resume(run, changes), warnings)
    wanted, replicas = _resumed_with(record, changes)
    async with platform.quotas.room_for(record.project, wanted, replicas, run):
        return await accepted(redis, await records.resume(run, changes), warnings)


def _resumed_with(record: RunRecord, changes: ResumeChanges) -> tuple[Recipe, int]:
    """The recipe and the rollout replicas of a run once it is resumed with changes."""
    recipe, replicas = record.recipe, record.rollout_replicas if changes.rollout is None else changes.rollout
    if changes.learner_ranks is None:
        return recipe, replicas
    learner = recipe.learner.model_copy(update={"ranks": changes.learner_ranks})
    return recipe.model_copy(update={"learner": learner}), replicas
