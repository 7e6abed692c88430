"""Owns the REST routes of runs: submit, show, scale, pause, resume, cancel, delete.

Must not act on a run; it changes the record, the controller acts.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import FastAPI, Query

from services.api.addresses import checked_addresses
from services.api.unknown_verdicts import last_views
from services.api.views import (
    AcceptedRun,
    MetricsView,
    ResumeRequest,
    RunList,
    RunSummary,
    RunView,
    ScaleRequest,
    StepView,
    SubmitRequest,
    WaitView,
)
from services.contracts import Closing, ProcessInfo
from services.settings import (
    Recipe,
    RecipeError,
    check_files,
    check_reward_limits,
    load_cluster_limits,
    parse_recipe,
)
from services.settings.faults import invalid
from services.storage.places import SHARED_FOLDERS
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.memory_plan import compare_plan
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import check_left, close_run
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import read_policy
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RESUMABLE, UNCHANGED, ResumeChanges, RunRecords
from services.waits import describe_wait

EVENTS_SHOWN = 50
EVALUATIONS_SHOWN = 1000
UNKNOWN_SHOWN = 5


def add_run_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    """Add the routes under /v1/runs, except those of dead letters."""
    _add_reads(app, redis, records)
    _add_changes(app, redis, records)


def _add_reads(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.get("/v1/runs")
    async def runs() -> RunList:
        """All runs, oldest first."""
        return RunList(runs=[RunSummary(**_summary(record)) for record in await records.all()])

    @app.get("/v1/runs/{run}")
    async def show(run: str) -> RunView:
        """One run: state, counters, processes, events, alerts, evaluations."""
        return await _view(redis, await records.get(run))

    @app.get("/v1/runs/{run}/metrics")
    async def metrics(run: str, after: Annotated[str, Query(pattern=r"^\d{1,15}(-\d{1,15})?$")] = "0-0") -> MetricsView:
        """The run's time series after the step whose id is `after`."""
        await records.get(run)
        steps = await EventLog(redis, RunKeys(run), "api").steps(after)
        return MetricsView(steps=[StepView(id=entry, **step.model_dump()) for entry, step in steps])

    @app.get("/v1/runs/{run}/waits")
    async def waits(run: str) -> list[WaitView]:
        """The waits of the run's live processes, longest first. A process that hangs disappears after 10 s."""
        await records.get(run)
        return _waits(await live_processes(redis, run), time.time())


def _add_changes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.post("/v1/runs", status_code=201)
    async def submit(request: SubmitRequest) -> AcceptedRun:
        """Add a run; it starts as soon as the cluster has room. A plan above Redis' maxmemory is refused."""
        recipe = _checked(request)
        run = request.id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if run in SHARED_FOLDERS:
            raise RecipeError(invalid("id", run, f"another name; every run uses the folder {run}"))
        warnings = await compare_plan(redis, records, run, recipe)
        try:
            await erase(redis, RunKeys(run), None)  # what processes of an earlier release wrote of a deleted run
            record = await records.create(run, recipe, request.files)
        except ValueError as error:
            raise RecipeError(str(error).removeprefix("run ")) from None  # the request's field is `id`
        return await _accept(redis, record, warnings)

    @app.post("/v1/runs/{run}/cancel", status_code=202)
    async def cancel(run: str) -> RunView | RunSummary:
        """Cancel a run; it is `cancelled` once none of its processes runs. A run that cannot be read: its summary."""
        record = await records.request_cancel(run)
        return RunSummary(**_summary(record)) if record.problem else await _view(redis, record)

    @app.post("/v1/runs/{run}/pause", status_code=202)
    async def pause(run: str) -> RunView:
        """Pause a running run: its processes stay, and no new groups are dispatched."""
        return await _view(redis, await records.request_pause(run))

    @app.post("/v1/runs/{run}/resume", status_code=202)
    async def resume(run: str, request: ResumeRequest | None = None) -> AcceptedRun:
        """Resume a paused run, or requeue a run that failed or was cancelled, unless its plan is above maxmemory."""
        return await _resume(redis, records, run, request)

    @app.delete("/v1/runs/{run}", status_code=202)
    async def delete(run: str, files: bool = False) -> RunSummary:
        """Delete a run that has ended: all that Redis holds of it, and with `files` its files in the store and folder.

        The controller does it; the run is unknown (404) once nothing is left.
        """
        if files and run in SHARED_FOLDERS:
            raise RecipeError(invalid("files", files, f"false; every run uses the folder {run}"))
        record = await records.get(run)
        if record.state.ended:
            await check_left(redis, run)
        return RunSummary(**_summary(await close_run(redis, run, Closing.DELETING, files=files)))

    @app.patch("/v1/runs/{run}/scale", status_code=202)
    async def scale(run: str, request: ScaleRequest) -> RunView:
        """Change the number of rollout replicas while the run continues, within the cluster's limits."""
        _check_limits((await records.get(run)).recipe, "rollout", request.rollout)
        return await _view(redis, await records.scale(run, request.rollout))


def _checked(request: SubmitRequest) -> Recipe:
    """The recipe of a submission. Raises RecipeError for it, or for the files beside it."""
    recipe = checked_addresses(parse_recipe(request.recipe))
    check_files(recipe, request.files)
    check_reward_limits(recipe)
    return recipe


def _check_limits(recipe: Recipe, field: str, replicas: int) -> None:
    """Raises RecipeError when the cluster may not grow so far; ClusterLimitsError when its limits are unreadable."""
    limits = load_cluster_limits()
    most = limits.most_replicas(recipe) if limits else None
    if limits and most is not None and replicas > most:
        requests = f"{recipe.rollout.cpus:g} CPUs, {recipe.rollout.gpus:g} GPUs"
        reason = f"the chart allows rollout {limits.rollout}, and a replica requests {requests} (rollout.maxReplicas)"
        raise RecipeError(invalid(field, replicas, f"1 to {most}; {reason}" if most else f"no replica; {reason}"))


def _check_ranks(recipe: Recipe, ranks: int) -> None:
    """Raises RecipeError for what is impossible only with so many ranks; what was accepted before stays accepted."""
    changed = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"ranks": ranks})})
    # By field, because the texts name the number of ranks.
    before = {fault.partition(":")[0] for fault in recipe.device_faults}
    if faults := [fault for fault in changed.device_faults if fault.partition(":")[0] not in before]:
        raise RecipeError("\n".join(faults))


def _summary(record: RunRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "state": record.state,
        "reason": record.reason,
        "created_at": record.created_at,
        "rollout_replicas": record.rollout_replicas,
        "closing": record.closing,
    }


def _waits(processes: list[ProcessInfo], now: float) -> list[WaitView]:
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


async def _alerts(redis: Redis, keys: RunKeys, processes: list[ProcessInfo]) -> list[str]:
    now = time.time()
    stalled = [
        describe_wait(process.id, wait, now) for process in processes for wait in process.waits if wait.stalled(now)
    ]
    starved: bytes | None = await redis.get(keys.starved)
    return [*([starved.decode(errors="replace")] if starved else []), *stalled]


async def _resume(redis: Redis, records: RunRecords, run: str, request: ResumeRequest | None) -> AcceptedRun:
    record = await records.get(run)
    if request and request.rollout is not None:
        _check_limits(record.recipe, "rollout", request.rollout)
    if request and request.learner_ranks is not None:
        _check_ranks(record.recipe, request.learner_ranks)
    requeued = record.state in RESUMABLE and not record.closing
    if requeued and (faults := record.recipe.sampling_faults):
        raise RecipeError("\n".join(faults))
    warnings = await compare_plan(redis, records, run, record.recipe) if requeued else []
    changes = ResumeChanges(**request.model_dump()) if request else UNCHANGED
    return await _accept(redis, await records.resume(run, changes), warnings)


async def _accept(redis: Redis, record: RunRecord, warnings: list[str]) -> AcceptedRun:
    """The answer to a submission or resumption; its warnings are events too."""
    for text in warnings:
        await EventLog(redis, RunKeys(record.id), "api").write("redis-memory-planned", text)
    return AcceptedRun(**dict(await _view(redis, record)), warnings=warnings)


async def _view(redis: Redis, record: RunRecord) -> RunView:
    keys = RunKeys(record.id)
    event_log = EventLog(redis, keys, "api")
    policy = await read_policy(redis, keys)
    processes = await live_processes(redis, record.id)
    return RunView(
        **_summary(record),
        recipe=record.recipe,
        history=list(record.history),
        policy_version=policy.version if policy else None,
        rollout_steps=policy.step if policy else 0,
        rollout_steps_total=record.recipe.limits.rollout_steps,
        groups=await group_counts(redis, keys),
        processes=processes,
        events=await event_log.last_events(EVENTS_SHOWN),
        alerts=await _alerts(redis, keys, processes),
        unknown_verdicts=await last_views(redis, keys, UNKNOWN_SHOWN),
        evaluations=await event_log.last_evaluations(EVALUATIONS_SHOWN),
        export_path=record.export_path,
        summary=record.summary,
        pause_requested=record.pause_requested,
        resumptions=record.resumptions,
        resume_step=record.resume_step,
        files=dict(record.files),
    )
