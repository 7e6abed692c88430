"""Owns the gateway's socket: serve the application until stopped.

Must not hold routes.
"""

from __future__ import annotations

import asyncio
import os
import socket

import uvicorn

from services.api.access.roles import Access
from services.api.app import create_app
from services.api.guard.connections import HEADER_BYTES, IDLE_S, guarded
from services.api.guard.hosts import load_host_names
from services.process.hosting import collect_garbage_rarely
from services.streams.connection.client import Redis

BACKLOG = 2048
PROXIES = "PENSTOCK_PROXIES"
"""Addresses and networks of proxies whose X-Forwarded-For names the client; without any, the header is ignored."""


async def serve_api(redis: Redis, access: Access, host: str, port: int, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set; requests in flight get 3 seconds.

    Raises OSError when the port is taken, HostNamesError, PricesError.
    """
    app = create_app(redis, access, load_host_names())
    collect_garbage_rarely()
    listener = socket.create_server((host, port), backlog=BACKLOG)
    # asyncio does it only for sockets that name the protocol. Without it a body waits 40 ms behind its headers, for the
    # client's delayed acknowledgement. Accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    proxies = os.environ.get(PROXIES, "")
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # a path may name what only its owner should know; metrics count, the audit log has changes
        lifespan="off",
        timeout_graceful_shutdown=3,
        http=guarded(),
        ws="none",
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=int(IDLE_S),
        backlog=BACKLOG,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        server_header=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await app.state.streams.hub.close()  # else open streams would be cut off after the 3 seconds
    server.should_exit = True
    await serving
