"""Owns the REST application: the order of its routes, error responses, and the probes.

Must not hold state; every request reads Redis.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.metrics import Info

from services.api.body_limit import TOO_LARGE, BodyLimit
from services.api.dead_letters import add_dead_route
from services.api.runs import add_run_routes
from services.api.unknown_verdicts import add_unknown_route
from services.api.views import ErrorResponse, Health, TargetGroup
from services.metrics import API_SECONDS
from services.settings import ClusterLimitsError, RecipeError
from services.settings.faults import explained
from services.streams.connection.client import Redis, RedisUnavailableError, connection_problem
from services.streams.connection.functions import RedisFullError
from services.streams.state.heartbeat import live_by_run
from services.streams.state.run_record import UnreadableRunError
from services.streams.state.runs import NoCheckpointError, RunRecords, RunStateError, UnknownRunError

STATUS = {
    UnknownRunError: 404,
    RunStateError: 409,
    UnreadableRunError: 409,
    RecipeError: 422,
    NoCheckpointError: 422,
    ClusterLimitsError: 503,
    RedisFullError: 503,
    RedisUnavailableError: 503,
}
"""By exception, derived ones included."""
UNTIMED = ("^/healthz$", "^/readyz$", "^/metrics$")
"""Routes that only probes and Prometheus call, every few seconds."""
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in sorted({*STATUS.values(), TOO_LARGE})
}


def create_app(redis: Redis) -> FastAPI:
    """The gateway over one Redis."""
    app = FastAPI(
        title="Penstock",
        version="1",
        description="Submit, watch, scale, pause, resume and cancel DAPO training runs.",
        responses=ERRORS,
    )
    records = RunRecords(redis)
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _respond_with(status))
    app.add_exception_handler(RequestValidationError, _reject)
    add_run_routes(app, redis, records)
    add_dead_route(app, redis, records)
    add_unknown_route(app, redis, records)
    _add_probe_routes(app, redis, records)
    app.add_middleware(BodyLimit)  # inside of what measures, which counts its refusals
    Instrumentator(should_group_status_codes=False, excluded_handlers=list(UNTIMED)).add(_measure).instrument(app)
    return app


def _measure(request: Info) -> None:
    """Time a request. All paths without a route share the label `none`, so that clients cannot add series."""
    API_SECONDS.labels(request.modified_handler, request.method, request.modified_status).observe(
        request.modified_duration
    )


def _respond_with(status: int):  # type: ignore[no-untyped-def]  # Starlette's handler type fits no narrower one
    async def handler(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=status)

    return handler


async def _reject(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part != "body")
        lines.append(explained(where or "body", fault)[:500])
    return JSONResponse({"detail": "\n".join(lines)}, status_code=422)


def _add_probe_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.get("/healthz")
    async def alive() -> Health:
        """Whether this process responds."""
        return Health(status="ok")

    @app.get("/readyz", responses={503: {"model": ErrorResponse}})
    async def ready() -> Response:
        """Whether Redis responds, so that requests can be served."""
        if found := await connection_problem(redis):
            return JSONResponse({"detail": f"Redis does not respond: {found}"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def exposition() -> Response:
        """This process's metrics, for Prometheus."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/prometheus/targets")
    async def targets(request: Request) -> list[TargetGroup]:
        """Every live process's metrics page (Prometheus HTTP service discovery)."""
        own = TargetGroup(targets=[request.url.netloc], labels={"service": "api"})
        active = [record.id for record in await records.active()]
        found = chain.from_iterable((await live_by_run(redis, [None, *active])).values())
        labelled = [
            TargetGroup(
                targets=[process.metrics],
                labels={"service": process.service, "run": process.run or "", "process": process.id},
            )
            for process in found
            if process.metrics  # the controller's metrics are this process's
        ]
        return [own, *labelled]
