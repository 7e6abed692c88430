"""Owns the routes of probes and of Prometheus.

Must not need a role: kubelets and scrapers have no token. The list of targets, which names runs, does need one.
"""

from __future__ import annotations

from itertools import chain

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.api.dependencies import PlatformOf, Viewer
from services.api.views.probes import Health, TargetGroup
from services.streams.connection.client import RedisUnavailableError, connection_problem
from services.streams.state.heartbeat import live_by_run

READY_S = 3.0
"""Within the deadline of a request."""

router = APIRouter(tags=["probes"])


@router.get("/healthz")
async def check_alive() -> Health:
    """Whether this process responds."""
    return Health(status="ok")


@router.get("/readyz")
async def check_ready(platform: PlatformOf) -> Health:
    """Whether Redis responds, so that requests can be served."""
    if found := await connection_problem(platform.redis, READY_S):
        raise RedisUnavailableError(f"Redis does not respond: {found}")
    return Health(status="ok")


@router.get("/metrics", response_class=PlainTextResponse)
async def expose_metrics() -> Response:
    """This process's metrics, for Prometheus."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/prometheus/targets")
async def list_targets(request: Request, platform: PlatformOf, principal: Viewer) -> list[TargetGroup]:
    """Every live process's metrics page (Prometheus HTTP service discovery), of the projects visible to you."""
    own = TargetGroup(targets=[request.url.netloc], labels={"service": "api"})
    active = [record.id for record in await platform.records.active() if principal.role_in(record.project)]
    found = chain.from_iterable((await live_by_run(platform.redis, [None, *active])).values())
    labelled = [
        TargetGroup(
            targets=[process.metrics],
            labels={"service": process.service, "run": process.run or "", "process": process.id},
        )
        for process in found
        if process.metrics  # the controller's metrics are this process's
    ]
    return [own, *labelled]
