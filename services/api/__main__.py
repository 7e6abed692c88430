"""Owns the gateway's command line: `python -m services.api --redis URL`, the REST API without a controller.

Must not hold logic.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from services.api.access.platform import platform_access
from services.api.access.roles import Access
from services.api.access.settings import AccessFileError
from services.api.guard.hosts import HostNamesError
from services.api.server import serve_api
from services.process.hosting import START_S, add_redis_option, configure_logging
from services.settings import PricesError
from services.streams.connection.client import RedisUnavailableError, connect


async def _serve(redis_url: str, access: Access, host: str, port: int, timeout_s: float) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    redis = await connect(redis_url, timeout_s)
    try:
        await serve_api(redis, access, host, port, stopping)
    finally:
        await redis.aclose()


def main() -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.api")
    add_redis_option(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8470)
    parser.add_argument(
        "--patience", type=float, default=START_S, help="seconds to wait for Redis (default: %(default)g)"
    )
    arguments = parser.parse_args()
    configure_logging("api")
    try:
        access = platform_access()  # before anything listens: without access nothing is served
        asyncio.run(_serve(arguments.redis, access, arguments.host, arguments.port, arguments.patience))
    except (AccessFileError, HostNamesError, PricesError, RedisUnavailableError, OSError) as error:
        print(f"api: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
