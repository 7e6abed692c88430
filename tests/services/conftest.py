"""Owns the fixtures of the services' tests.

Must not start a server of its own.
"""

import httpx
import pytest

from services.api.app import create_app
from tests.harness.api_access import ACCESS, HEADERS


@pytest.fixture
async def api(redis):
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        yield client


@pytest.fixture
async def own_api(own_server):
    """A gateway over a server that no other test uses."""
    transport = httpx.ASGITransport(app=create_app(own_server[1], ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        yield client
