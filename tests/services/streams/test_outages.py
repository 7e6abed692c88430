"""The metric of Redis' outages: it grows while no server answers, and is 0 for clients that no longer try."""

import asyncio
import os
import signal
import time

from prometheus_client import REGISTRY

from services.streams.connection import outages
from services.streams.connection.client import client, connection_problem
from services.streams.connection.outages import STALE_S, Outage, longest_outage_s
from tests.harness.free_ports import free_port
from tests.harness.servers.redis_servers import ValkeyServer


def shown():
    return REGISTRY.get_sample_value("penstock_redis_outage_seconds")


async def test_an_outage_is_shown_until_the_server_answers(monkeypatch):
    monkeypatch.setattr(outages, "_outages", type(outages._outages)())
    port = free_port()
    redis = client(f"redis://127.0.0.1:{port}/0")
    assert shown() == 0.0
    asked = asyncio.create_task(redis.ping())
    seen = []
    async with asyncio.timeout(30):
        while len(set(seen)) < 3:
            await asyncio.sleep(0.05)
            seen.append(shown())
    assert seen == sorted(seen), "it grows without a further attempt"
    server = ValkeyServer(port)
    try:
        await asyncio.to_thread(server.start, timeout=60)
        async with asyncio.timeout(60):
            assert await asked
        assert shown() == 0.0
    finally:
        await redis.aclose()
        server.terminate()


async def test_a_server_that_hangs_is_an_outage_too(own_server, monkeypatch):
    monkeypatch.setattr(outages, "_outages", type(outages._outages)())
    server, _ = own_server
    redis = client(f"redis://127.0.0.1:{server.port}/0")
    await redis.ping()
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        assert "no answer within 0.5 s" in await connection_problem(redis, 0.5)
        assert shown() > 0
    finally:
        os.kill(server._process.pid, signal.SIGCONT)
    assert await connection_problem(redis, 30) is None
    assert shown() == 0.0
    await redis.aclose()


def test_a_client_that_no_longer_tries_is_not_counted(monkeypatch):
    monkeypatch.setattr(outages, "_outages", type(outages._outages)())
    outage = Outage()
    outage.failed()
    began = outage.since
    assert 0 < outage.seconds(began + 5) == 5
    assert outage.seconds(time.monotonic() + STALE_S + 1) == 0.0
    outage.failed()
    assert outage.since == began, "the first failure counts"
    assert longest_outage_s() > 0
    del outage
    assert longest_outage_s() == 0.0, "a closed client is gone"
