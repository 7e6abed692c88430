"""Owns the fixtures of tests that need a server of their own, and redis-py's client beside the platform's.

Must not replace a fixture that the other tests use.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.streams.connection.client import connect
from services.streams.keys import RunKeys
from tests.harness.servers.redis_servers import Process, start_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    """A server that may be stopped, filled or kept busy."""
    with start_server(tmp_path) as started:
        yield started


@pytest.fixture
async def recorded(server: Process) -> AsyncIterator[Any]:
    """The platform's client of `server`, which has the record of the run `run`."""
    opened = await connect(f"redis://127.0.0.1:{server.port}/0")
    await opened.hset(RunKeys("run").record, "state", "running")
    yield opened
    await opened.aclose()


@pytest.fixture
async def plain(server: Process) -> AsyncIterator[Any]:
    """redis-py's own client of `server`, which retries nothing."""
    opened = Redis(port=server.port, retry=None)
    yield opened
    await opened.aclose()
