"""The limit on the size of a request's body, over real sockets: announced lengths, and chunks without any."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import HTTPException

from services.api.guard.body_limit import MOST_BODY, BodyLimit
from services.api.server import serve_api
from services.settings.rewards.files import MOST_BYTES
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

CHUNK = 1 << 20
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def served(redis):
    """The address of a gateway on a socket."""
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, ACCESS, "127.0.0.1", port, stopping))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=HEADERS) as api:
            async with asyncio.timeout(30):
                while not await answers(api):
                    assert not serving.done()
                    await asyncio.sleep(0.02)
            yield api
    finally:
        stopping.set()
        await serving


async def answers(api):
    try:
        return (await api.get("/healthz")).status_code == 200
    except httpx.TransportError:
        return False


async def test_bodies_above_the_limit_are_refused(redis, run_id):
    sent = []

    async def chunks():
        for _ in range(4 * MOST_BODY // CHUNK):
            sent.append(CHUNK)
            yield b" " * CHUNK

    async with served(redis) as api:
        announced = await api.post("/v1/runs", content=b" " * (MOST_BODY + 1), headers=JSON)
        chunked = await api.post("/v1/runs", content=chunks(), headers=JSON)
        small = await api.post("/v1/runs", json={"id": run_id, "recipe": recipe_document("/model")})
        metrics = (await api.get("/metrics")).text
    expected = f"is not valid: expected at most {MOST_BODY} bytes"
    assert announced.status_code == chunked.status_code == 413
    assert announced.json()["detail"] == f"body: {MOST_BODY + 1} {expected}"
    assert chunked.json()["detail"].startswith("body: ")
    assert chunked.json()["detail"].endswith(expected)
    assert small.status_code == 201
    counted = [line for line in metrics.splitlines() if 'status="413"' in line and "_count" in line]
    assert counted, metrics


async def test_100_mib_are_refused_before_they_arrive(redis):
    """The answer comes after what was sent of them, echoes none of it, and others are served meanwhile."""
    async with served(redis) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.base_url.port)
        lines = [
            f"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {100 * 2**20}",
            "Content-Type: application/json",
        ]
        lines += [f"{name}: {value}" for name, value in HEADERS.items()]
        writer.write("\r\n".join([*lines, "", '{"recipe": "MARKED']).encode())
        async with asyncio.timeout(30):
            assert b" 413 " in await reader.readline()
            answered = await reader.readuntil(b"}]")
            assert (await api.get("/v1/runs")).status_code == 200
        writer.close()
        assert f'"field":"body","value":"{100 * 2**20}"'.encode() in answered
        assert b"MARKED" not in answered


async def test_the_largest_files_are_below_the_limit(api, redis, run_id):
    """Control characters need six bytes each in JSON, more than any other character."""
    names = [f"./words{number}.txt" for number in range(4)]
    document = recipe_document("/model", verifier={"files": names})
    body = json.dumps({"id": run_id, "recipe": document, "files": dict.fromkeys(names, "\x01" * MOST_BYTES)})
    assert MOST_BODY * 3 / 4 < len(body) < MOST_BODY
    answer = await api.post("/v1/runs", content=body, headers=JSON)
    assert answer.status_code == 201, answer.text
    assert len((await RunRecords(redis).get(run_id)).files) == len(names)


@pytest.mark.parametrize(("sizes", "status"), [([MOST_BODY], 200), ([MOST_BODY - 1, 1, 1], 413), ([], 200)])
async def test_chunks_are_counted_together(sizes, status):
    left = [{"type": "http.request", "body": b" " * size, "more_body": True} for size in sizes]
    left.append({"type": "http.disconnect"})

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def receive():
        return left.pop(0)

    serving = BodyLimit(app)({"type": "http", "method": "POST", "path": "/v1/runs", "headers": []}, receive, None)
    if status == 200:
        await serving
        assert left == []
    else:
        with pytest.raises(HTTPException, match="413: body: 8388609 is not valid"):
            await serving


async def test_a_length_that_is_no_number_is_the_servers_to_refuse(redis):
    async with served(redis) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.base_url.port)
        writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n")
        async with asyncio.timeout(30):
            assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
