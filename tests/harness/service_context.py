"""Owns what a service is given by its shell, for a run that exists only in Redis.

Must not start a service.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.contracts import ProcessInfo
from services.settings import parse_recipe
from services.shell import Context
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.presence import Presence
from services.streams.records import RunRecords
from services.waits import Waits


@asynccontextmanager
async def service_context(redis: Any, run: str, document: dict[str, Any], service: str) -> AsyncIterator[Context]:
    """What the shell gives a service, for a run that exists only in Redis."""
    records = RunRecords(redis)
    try:
        record = await records.get(run)
    except LookupError:
        record = await records.create(run, parse_recipe(document))
    info = ProcessInfo(id=f"{service}-{uuid.uuid4().hex[:6]}", service=service, run=run, host="127.0.0.1", pid=0,
                       metrics="127.0.0.1:0")  # fmt: skip
    keys = RunKeys(run)
    journal, waits = Journal(redis, keys, service), Waits()
    async with Presence(redis, info, waits, journal) as presence:
        yield Context(redis, keys, record, presence, journal, asyncio.Event(), "127.0.0.1", waits)
