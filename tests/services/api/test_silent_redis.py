"""A Redis that hangs: every route is answered with 503 after one deadline, and works again by itself."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.api.access.settings import AccessSettings
from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.app import create_app
from services.api.guard.redis_deadline import DEADLINE_S
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS, TOKEN
from tests.harness.small_run import recipe_document

TICK_S = 0.1
assert DEADLINE_S <= 4  # and half a second or less for what a request does without Redis
READS = ["/v1/runs", "/v1/runs/x", "/v1/runs/x/metrics", "/v1/runs/x/events", "/readyz", "/v1/prometheus/targets"]
CHANGES = [("POST", "/v1/runs/x/cancel"), ("PATCH", "/v1/runs/x/scale"), ("DELETE", "/v1/runs/x")]


@asynccontextmanager
async def one_deadline() -> AsyncIterator[None]:
    """Fails if what is done here waits for a second deadline.

    Counts what the event loop was free for: on a busy machine each tick takes longer, as does all else, and two
    deadlines count as less than two.
    """
    ticks = 0

    async def count() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
    assert ticks * TICK_S < 1.5 * DEADLINE_S, "a request waited for others, or twice"


@pytest.fixture
async def hung(own_server):
    """An API whose Redis is stopped; the function continues it."""
    server, redis = own_server
    os.kill(server._process.pid, signal.SIGSTOP)
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
            yield client, lambda: os.kill(server._process.pid, signal.SIGCONT)
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


async def test_every_route_is_answered_and_recovers(hung):
    client, continue_redis = hung
    requests = [client.get(path) for path in READS]
    requests += [client.request(method, path, json={"rollout": 1}) for method, path in CHANGES]
    async with one_deadline():
        answers = await asyncio.gather(*requests)
    for answer in answers:
        assert answer.status_code == 503, (answer.request.url, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert "Redis" in answer.json()["detail"]
    detail = answers[1].json()["detail"]
    assert detail.startswith("GET /v1/runs/{run} waited for Redis at redis://127.0.0.1:")
    assert "whether the change was made" not in detail
    assert all(answer.json()["detail"].startswith("nothing was changed: ") for answer in answers[-3:])
    assert (await client.get("/healthz")).status_code == 200
    continue_redis()
    assert (await client.get("/v1/runs")).status_code == 200
    assert (await client.get("/v1/runs/x")).status_code == 404
    assert (await client.get("/readyz")).status_code == 200


async def test_more_requests_than_connections_wait_no_longer(hung):
    client, continue_redis = hung
    async with one_deadline():
        answers = await asyncio.gather(*(client.get("/v1/runs/x") for _ in range(60)))
    assert {answer.status_code for answer in answers} == {503}
    continue_redis()
    assert {answer.status_code for answer in await asyncio.gather(*(client.get("/v1/runs") for _ in range(60)))} == {
        200
    }


@pytest.mark.parametrize("method", ["active", "_create"])
async def test_a_change_amid_which_redis_stops_waits_once(own_server, monkeypatch, method):
    """It is noted, and holds its project's lock, when Redis stops: the lock and the outcome wait no 4 s more each."""
    server, redis = own_server
    settings = AccessSettings.model_validate({"projects": {"default": {"runs": 5}}})
    access = TokenAccess({token_digest(TOKEN): local_principal()}, settings)
    ran = getattr(RunRecords, method)

    async def stopped(*arguments):
        os.kill(server._process.pid, signal.SIGSTOP)
        return await ran(*arguments)

    transport = httpx.ASGITransport(app=create_app(redis, access))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        with monkeypatch.context() as patch:
            patch.setattr(RunRecords, method, stopped)
            async with one_deadline():
                answer = await client.post("/v1/runs", json={"id": "cut-off", "recipe": recipe_document("/model")})
        assert (answer.status_code, "look before you repeat" in answer.json()["detail"]) == (503, True)
        os.kill(server._process.pid, signal.SIGCONT)
        assert (await client.get("/v1/runs")).status_code == 200
