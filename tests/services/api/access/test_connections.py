"""The limits of connections, over real sockets: slow headers and bodies, idle connections, clients that do not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from services.api import server
from services.api.guard import body_limit, connections
from tests.harness.api_access import ACCESS, HEADERS, TOKEN
from tests.services.api.access.platforms import served

PATIENCE_S = 20.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
START = b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., Awaitable[Streams]]]:
    """A function that opens a connection to a port and sends something; all are closed at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(port: int, first: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writers.append(writer)
        writer.write(first)
        await writer.drain()
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that the server sends until it ends the connection."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionResetError:
        return b""


async def drip(writer: asyncio.StreamWriter, part: bytes) -> None:
    """Send a part again and again, until the server has had enough."""
    try:
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)
    except OSError:
        return


async def test_slow_headers_end_the_connection(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "guarded", lambda: connections.guarded(headers_s=0.5))
    async with served(redis, ACCESS) as port:
        silent, _ = await opened(port)
        slow, writer = await opened(port, START)
        dripping = asyncio.create_task(drip(writer, b"x-more: 1\r\n"))
        began = time.monotonic()
        await asyncio.gather(until_closed(silent), until_closed(slow))
        assert time.monotonic() - began < PATIENCE_S / 2
        await dripping


async def test_slow_headers_of_a_second_request(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "guarded", lambda: connections.guarded(headers_s=0.5))
    async with served(redis, ACCESS) as port:
        reader, writer = await opened(port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readline()
        dripping = asyncio.create_task(drip(writer, b"G"))
        await until_closed(reader)
        await dripping


async def test_a_slow_body_is_answered_with_408(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit.BodyLimit.__init__, "__defaults__", (0.5,))
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    async with served(redis, ACCESS) as port:
        head = START + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        reader, writer = await opened(port, head)
        dripping = asyncio.create_task(drip(writer, b" "))
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"expected the whole body" in answer
        await dripping


async def test_a_body_without_a_token_is_not_awaited(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers are refused before their body has come, and cannot hold the connection with it."""
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    async with served(redis, ACCESS) as port:
        head = b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        reader, writer = await opened(port, head)
        dripping = asyncio.create_task(drip(writer, b" "))
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 401 ")
        await dripping


async def test_headers_have_a_size(redis: Any, opened: Any) -> None:
    async with served(redis, ACCESS) as port:
        reader, _ = await opened(port, START + b"x-long: " + b"x" * 100_000)
        assert b" 400 " in (await until_closed(reader)).splitlines()[0]


async def test_300_idle_connections_do_not_stop_others(redis: Any, opened: Any) -> None:
    async with served(redis, ACCESS) as port:
        for number in range(300):
            await opened(port, b"GET /v1" if number % 2 else b"")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=PATIENCE_S) as api:
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(10):
                    assert (await api.get("/v1/whoami")).status_code == 200


async def test_above_the_limit_the_longest_idle_ends(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    async with served(redis, ACCESS) as port:
        idle = [await opened(port) for _ in range(6)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS) as api:
            assert (await api.get("/v1/whoami")).status_code == 200
        assert await until_closed(idle[0][0]) == b""


async def test_a_client_that_reads_nothing_is_cut_off(redis: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "guarded", lambda: connections.guarded(stuck_s=0.5))
    cut_off = asyncio.Event()
    lost = connections.GuardedConnection.connection_lost

    def noted(self: connections.GuardedConnection, error: Exception | None) -> None:
        if self.flow.write_paused:
            cut_off.set()
        lost(self, error)

    monkeypatch.setattr(connections.GuardedConnection, "connection_lost", noted)
    async with served(redis, ACCESS) as port:
        reader, writer = await opened(port)
        reader._transport.pause_reading()
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        async with asyncio.timeout(PATIENCE_S):
            await cut_off.wait()
