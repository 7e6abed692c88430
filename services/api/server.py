"""Owns the gateway's socket: serve the application until stopped.

Must not hold routes.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from services.api.app import create_app
from services.streams.connection.client import Redis


async def serve_api(redis: Redis, host: str, port: int, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set; requests in flight get 3 seconds. Raises OSError when the port is taken."""
    listener = socket.create_server((host, port))
    config = uvicorn.Config(create_app(redis), log_level="warning", lifespan="off", timeout_graceful_shutdown=3)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    server.should_exit = True
    await serving
