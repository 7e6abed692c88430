"""Owns the REST application: its routes' order, how errors are answered, and the probes.

Must not hold state; every request reads Redis.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.metrics import Info

from services.api.dead_letters import add_dead_routes
from services.api.runs import add_run_routes
from services.api.views import Fault, Health, TargetGroup
from services.metrics import API_SECONDS
from services.settings import ClusterLimitsError, RecipeError
from services.streams.connection.client import Redis, RedisUnavailableError, connection_problem
from services.streams.connection.functions import RedisFullError
from services.streams.state.dead_letters import NotRedrivableError, UnknownLetterError
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import NoCheckpointError, RunRecords, RunStateError, UnknownRunError

STATUS = {
    UnknownRunError: 404, UnknownLetterError: 404, RunStateError: 409, NotRedrivableError: 409, RecipeError: 422,
    NoCheckpointError: 422, ClusterLimitsError: 503, RedisFullError: 503, RedisUnavailableError: 503,
}  # fmt: skip
"""By exception, and those derived from it."""
UNTIMED = ("^/healthz$", "^/readyz$", "^/metrics$")
"""Routes that only probes and Prometheus call, every few seconds."""
FAULTS: dict[int | str, dict[str, Any]] = {code: {"model": Fault} for code in sorted({*STATUS.values()})}


def create_app(redis: Redis) -> FastAPI:
    """The gateway over one Redis."""
    app = FastAPI(
        title="Penstock", version="1", description="Submit, watch, scale, pause, resume and cancel DAPO training runs.",
        responses=FAULTS,
    )  # fmt: skip
    records = RunRecords(redis)
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, _answer_with(status))
    app.add_exception_handler(RequestValidationError, _explain)
    add_run_routes(app, redis, records)
    add_dead_routes(app, redis, records)
    _add_probe_routes(app, redis, records)
    Instrumentator(should_group_status_codes=False, excluded_handlers=list(UNTIMED)).add(_measure).instrument(app)
    return app


def _measure(request: Info) -> None:
    """Time a request. Paths without a route share the one called `none`, so that nobody can add series."""
    API_SECONDS.labels(request.modified_handler, request.method, request.modified_status).observe(
        request.modified_duration
    )


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


def _add_probe_routes(app: FastAPI, redis: Redis, records: RunRecords) -> None:
    @app.get("/healthz")
    async def alive() -> Health:
        """Whether this process answers."""
        return Health(status="ok")

    @app.get("/readyz", responses={503: {"model": Fault}})
    async def ready() -> Response:
        """Whether Redis answers, so that requests can be served."""
        if found := await connection_problem(redis):
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
            if one.metrics  # the controller's own are this process's
        ]
        return [own, *labelled]
