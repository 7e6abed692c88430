"""Owns a TCP proxy that adds a fixed latency to every byte in both directions, and limits no throughput.

Must not interpret the bytes. `python -m benchmarks.data_plane.latency PORT MILLISECONDS` prints its own port.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHUNK = 1 << 18


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Forward one direction: each chunk leaves `delay_s` after it arrived, whatever else is in flight."""
    in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def deliver() -> None:
        while True:
            due, chunk = await in_flight.get()
            if (early := due - clock()) > 0:
                await asyncio.sleep(early)
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        writer.close()

    delivering = asyncio.create_task(deliver())
    try:
        while chunk := await reader.read(CHUNK):
            in_flight.put_nowait((clock() + delay_s, chunk))
        in_flight.put_nowait((clock() + delay_s, b""))
        await delivering
    except OSError:
        delivering.cancel()
        writer.close()


async def serve(port: int, delay_s: float) -> None:
    """Forward a port of its own to `port` of this machine until the process is ended."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, far_writer, delay_s), _pump(far_reader, writer, delay_s))

    server = await asyncio.start_server(carry, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def delayed(port: int, milliseconds: float) -> Iterator[str]:
    """The URL of the server at `port` through a proxy in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_plane.latency", str(port), str(milliseconds)]
    process: Any = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        yield f"redis://127.0.0.1:{int(process.stdout.readline())}/0"
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
