"""Owns the REST routes.

Must not hold state; every request reads Redis.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.api.views import (
    Fault,
    Health,
    MetricsView,
    RunList,
    RunSummary,
    RunView,
    ScaleRequest,
    StepView,
    SubmitRequest,
    TargetGroup,
)  # fmt: skip
from services.settings import RecipeError, parse_recipe
from services.streams.connection import Redis, trouble
from services.streams.effects import group_counts
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.presence import live_processes
from services.streams.records import EndedRunError, RunRecord, RunRecords, UnknownRunError

STATUS = {UnknownRunError: 404, EndedRunError: 409, RecipeError: 422}
EVENTS_SHOWN = 50
FAULTS: dict[int | str, dict[str, Any]] = {code: {"model": Fault} for code in (404, 409, 422)}


def create_app(redis: Redis) -> FastAPI:
    """The gateway over one Redis."""
    app = FastAPI(
        title="Penstock", version="1", description="Submit, watch, scale and cancel DAPO training runs.",
        responses=FAULTS,
    )  # fmt: skip
    records = RunRecords(redis)
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _answer_with(status))
    app.add_exception_handler(RequestValidationError, _explain)
    _add_run_routes(app, redis, records)
    _add_probe_routes(app, redis, records)
    return app


def _answer_with(status: int):  # type: ignore[no-untyped-def]  # Starlette's handler type fits no narrower one
    async def handler(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=status)

    return handler


async def _explain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    lines = []
    for one in error.errors():
        where = ".".join(str(part) for part in one["loc"] if part != "body")
        lines.append(f"{where or 'body'}: value {one.get('input')!r} is not accepted; {one['msg']}"[:500])
    return JSONResponse({"detail": "\n".join(lines)}, status_code=422)


def _add_run_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.post("/v1/runs", status_code=201)
    async def submit(request: SubmitRequest) -> RunView:
        """Add a run; it starts as soon as the cluster has room."""
        recipe = parse_recipe(request.recipe)
        run = request.id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            record = await records.create(run, recipe)
        except ValueError as error:
            raise RecipeError(f"id: {error}") from None
        return await _view(redis, record)

    @app.get("/v1/runs")
    async def runs() -> RunList:
        """All runs, oldest first."""
        return RunList(runs=[RunSummary(**_summary(record)) for record in await records.all()])

    @app.get("/v1/runs/{run}")
    async def show(run: str) -> RunView:
        """One run: state, counters, processes, events, evaluations."""
        return await _view(redis, await records.get(run))

    @app.post("/v1/runs/{run}/cancel", status_code=202)
    async def cancel(run: str) -> RunView:
        """Ask for a run's end; it is `cancelled` once nothing of it runs."""
        return await _view(redis, await records.request_cancel(run))

    @app.patch("/v1/runs/{run}/scale", status_code=202)
    async def scale(run: str, request: ScaleRequest) -> RunView:
        """Ask for another number of rollout replicas, while the run goes on."""
        return await _view(redis, await records.scale(run, request.rollout))

    @app.get("/v1/runs/{run}/metrics")
    async def metrics(run: str, after: Annotated[str, Query(pattern=r"^\d{1,15}(-\d{1,15})?$")] = "0-0") -> MetricsView:
        """The run's time series, behind the step whose id is `after`."""
        await records.get(run)
        steps = await Journal(redis, RunKeys(run), "api").steps(after)
        return MetricsView(steps=[StepView(id=entry, **step.model_dump()) for entry, step in steps])


def _add_probe_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.get("/healthz")
    async def alive() -> Health:
        """Whether this process answers."""
        return Health(status="ok")

    @app.get("/readyz", responses={503: {"model": Fault}})
    async def ready() -> Response:
        """Whether Redis answers, so that requests can be served."""
        if found := await trouble(redis):
            return JSONResponse({"detail": f"Redis does not answer: {found}"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def exposition() -> Response:
        """This process's metrics, for Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/prometheus/targets")
    async def targets(request: Request) -> list[TargetGroup]:
        """Every live process's metrics page (Prometheus HTTP service discovery)."""
        own = TargetGroup(targets=[request.url.netloc], labels={"service": "api"})
        found = await live_processes(redis, None)
        for record in await records.all():
            if not record.state.ended:
                found += await live_processes(redis, record.id)
        labelled = [
            TargetGroup(targets=[one.metrics], labels={"service": one.service, "run": one.run or "", "process": one.id})
            for one in found
        ]
        return [own, *labelled]


def _summary(record: RunRecord) -> dict[str, Any]:
    return {
        "id": record.id, "state": record.state, "reason": record.reason, "created_at": record.created_at,
        "rollout_replicas": record.rollout_replicas,
    }  # fmt: skip


async def _view(redis: Redis, record: RunRecord) -> RunView:
    keys = RunKeys(record.id)
    journal = Journal(redis, keys, "api")
    version = await journal.policy_version()
    return RunView(
        **_summary(record),
        recipe=record.recipe,
        history=list(record.history),
        policy_version=version,
        rollout_steps=version or 0,
        rollout_steps_total=record.recipe.limits.rollout_steps,
        groups=await group_counts(redis, keys),
        processes=await live_processes(redis, record.id),
        events=[event for _, event in await journal.events()][-EVENTS_SHOWN:],
        evaluations=await journal.evaluations(),
        export_path=record.export_path,
        summary=record.summary,
    )
