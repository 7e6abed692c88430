"""Owns the REST application: its routers, the order of what every request passes, error responses.

Must not hold state; every request reads Redis.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.metrics import Info
from starlette.routing import BaseRoute

from services.api.access.quotas import QuotaError
from services.api.access.roles import Access, AccessUnavailableError, ForbiddenError, UnauthenticatedError
from services.api.answers.openapi import describe
from services.api.answers.problems import RequestIds, answer_problems
from services.api.dependencies import Platform
from services.api.guard.auditing import AuditChanges, AuditDenials
from services.api.guard.body_limit import BodyLimit
from services.api.guard.headers import SecurityHeaders
from services.api.guard.hosts import HostCheck, HostNames
from services.api.guard.json_only import few_values, json_only
from services.api.guard.known_query import known_query
from services.api.guard.origins import OriginCheck
from services.api.guard.rates import Rates
from services.api.guard.redis_deadline import redis_deadline
from services.api.guard.sign_in import SignIn, is_closed
from services.api.routes import audit, dead_letters, page, probes, projects, recipes, runs, unknown_verdicts
from services.api.routes.lifecycle import adoption, changes, edits, endings, queue, submissions
from services.api.routes.reading import compare, events, files, ledger, logs, samples
from services.api.routes.reading.stored_files import MissingFileError
from services.api.streams.open_streams import open_streams
from services.metrics import API_SECONDS
from services.settings import ClusterLimitsError, RecipeError
from services.storage.errors import MissingObjectError, StoreError
from services.streams.access.project_lock import ProjectBusyError
from services.streams.connection.client import Redis, RedisUnavailableError
from services.streams.connection.functions import RedisFullError
from services.streams.repeatable import OtherRequestError
from services.streams.runs.lists import CursorError
from services.streams.runs.remains import RemainsError
from services.streams.state.run_record import UnreadableRunError
from services.streams.state.runs import NoCheckpointError, RunStateError, StaleRevisionError, UnknownRunError

ROUTERS = (
    runs.router,
    submissions.router,
    changes.router,
    edits.router,
    endings.router,
    queue.router,
    adoption.router,
    events.router,
    files.router,
    logs.router,
    compare.router,
    ledger.router,
    samples.router,
    dead_letters.router,
    unknown_verdicts.router,
    recipes.router,
    projects.router,
    audit.router,
    probes.router,
    page.router,
)
STATUS = {
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    UnknownRunError: 404,
    MissingFileError: 404,
    MissingObjectError: 404,
    StaleRevisionError: 412,
    OtherRequestError: 422,
    CursorError: 422,
    RemainsError: 422,
    StoreError: 503,
    RunStateError: 409,
    UnreadableRunError: 409,
    QuotaError: 409,
    RecipeError: 422,
    NoCheckpointError: 422,
    AccessUnavailableError: 503,
    ProjectBusyError: 503,
    ClusterLimitsError: 503,
    RedisFullError: 503,
    RedisUnavailableError: 503,
}
"""By exception, derived ones included."""
UNTIMED = ("^/healthz$", "^/readyz$", "^/metrics$")
"""Routes that only probes and Prometheus call, every few seconds."""
LOOPBACK_ONLY = HostNames()


def _routes() -> tuple[BaseRoute, ...]:
    """All routes, with what every request of theirs depends on."""
    router = APIRouter(
        dependencies=[
            Depends(known_query),
            Depends(json_only),
            Depends(few_values),
            Depends(redis_deadline, scope="function"),
        ],
        generate_unique_id_function=lambda route: route.name,
    )
    for each in ROUTERS:
        router.include_router(each)
    return tuple(router.routes)


ROUTES = _routes()
"""They know no application, and are most of what one costs: 80 ms of CPU time."""


def create_app(redis: Redis, access: Access, hosts: HostNames = LOOPBACK_ONLY) -> FastAPI:
    """The gateway over one Redis, for those who have access, reached by the names in `hosts` and those of loopback.

    Raises PricesError.
    """
    app = FastAPI(
        title="Penstock",
        version="1",
        description="Submit, watch, scale, pause, resume and cancel DAPO training runs.",
        routes=list(ROUTES),
        redirect_slashes=False,
        docs_url=None,  # the page has it, without another host
        redoc_url=None,
    )
    app.state.platform = platform = Platform(redis, access)
    app.state.streams = open_streams(redis)
    answer_problems(app, STATUS)
    page.mount_files(app)
    describe(app, is_closed)
    guards = _guards(platform, hosts)
    for guard, options in reversed(guards):
        app.add_middleware(guard, **options)
    Instrumentator(should_group_status_codes=False, excluded_handlers=list(UNTIMED)).add(_measure).instrument(app)
    app.add_middleware(RequestIds)  # outside of what measures: it answers unexpected exceptions
    app.add_middleware(SecurityHeaders)
    return app


def _guards(platform: Platform, hosts: HostNames) -> list[tuple[Any, dict[str, Any]]]:
    """What every request passes, the first one first; inside of what measures, which counts their refusals."""
    log, access, rates = platform.audit, platform.access, Rates()
    return [
        (AuditDenials, {"audit": log, "access": access, "rates": rates}),
        (HostCheck, {"hosts": hosts}),
        (OriginCheck, {}),
        (SignIn, {"access": access, "rates": rates}),
        (BodyLimit, {}),
        (AuditChanges, {"audit": log, "access": access}),
    ]


def _measure(request: Info) -> None:
    """Time a request until its response starts: a stream may last for hours.

    All paths without a route share the label `none`, so that clients cannot add series.
    """
    API_SECONDS.labels(request.modified_handler, request.method, request.modified_status).observe(
        request.modified_duration_without_streaming
    )
