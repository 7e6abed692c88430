"""Owns a server that is short of memory, and quicker measurements of it.

Must not start a service.
"""

import pytest


@pytest.fixture(autouse=True)
def runs(tmp_path_factory, monkeypatch):
    """The folder of runs, in which samplers archive groups; not the test's own, which may hold its data."""
    folder = tmp_path_factory.mktemp("runs")
    monkeypatch.setenv("PENSTOCK_RUNS", str(folder))
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Memory is measured more often, so that what follows after some looks comes sooner."""
    monkeypatch.setattr("services.sampler.queue.maintenance.EVERY_S", 0.1)


@pytest.fixture
async def crowded(own_server):
    """A server with other data, and how to set which share of its maxmemory is in use (0: no limit)."""
    _, redis = own_server
    await redis.setrange("other", 2**26, "x")

    async def fill(share):
        used = (await redis.info("memory"))["used_memory"]
        await redis.config_set("maxmemory", int(used / share) if share else 0)

    return redis, fill
