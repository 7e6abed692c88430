"""A service on a real socket that answers as a test says, down to the bytes, and keeps what it got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Received:
    """A request as it came; header names are lower-case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def texts(self) -> list[str]:
        return [request["response"] for request in self.document["requests"]]


Script = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeService:
    """`script` answers each request; `most` is the largest number of requests that were in flight at once."""

    script: Script
    received: list[Received] = field(default_factory=list)
    port: int = 0
    in_flight: int = 0
    most: int = 0
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def got(self, requests: int) -> None:
        """Wait until so many requests have arrived."""
        async with asyncio.timeout(5), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= requests)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, _ = request.split(" ")
                got = Received(method, path, headers, body)
                async with self.arrived:
                    self.received.append(got)
                    self.arrived.notify_all()
                self.in_flight += 1
                self.most = max(self.most, self.in_flight)
                try:
                    await self.script(got, writer)
                    await writer.drain()
                finally:
                    self.in_flight -= 1
        writer.close()


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeService]:
    """The service, until the block ends; connections that are open then are cut."""
    service = FakeService(script)
    tasks = set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await service.serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    service.port = server.sockets[0].getsockname()[1]
    try:
        yield service
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


def http(status: int, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
    """An answer of HTTP/1.1."""
    fields = {"Content-Length": str(len(body)), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body


def always(status: int, document: Any = None, headers: Mapping[str, str] = NO_HEADERS) -> Script:
    """The same answer to every request: a document, or bytes as they are."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()

    async def script(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(http(status, body, headers))

    return script


def judging(judge: Callable[[dict[str, Any]], Any]) -> Script:
    """Each text judged by `judge` from its request, with ids."""

    async def script(got: Received, writer: asyncio.StreamWriter) -> None:
        results = [{"id": request["id"], **judge(request)} for request in got.document["requests"]]
        writer.write(http(200, json.dumps({"results": results}).encode()))

    return script


def in_turn(*scripts: Script) -> Script:
    """The scripts in turn, the last one for ever."""
    left = list(scripts)

    async def script(got: Received, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(got, writer)

    return script


async def silence(_: Received, __: asyncio.StreamWriter) -> None:
    """No answer, for ever."""
    await asyncio.Event().wait()
