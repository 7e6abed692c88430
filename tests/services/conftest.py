"""Owns the fixtures of the services' tests.

Must not start a server of its own.
"""

import httpx
import pytest

from services.api.app import create_app


@pytest.fixture
async def api(redis):
    transport = httpx.ASGITransport(app=create_app(redis))
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        yield client
