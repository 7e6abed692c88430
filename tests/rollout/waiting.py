"""Owns waiting in the rollout tests.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def until(condition: Callable[[], Awaitable[Any]], deadline_s: float) -> Any:
    """Poll until `condition` returns a true value; returns it."""
    async with asyncio.timeout(deadline_s):
        while True:
            if found := await condition():
                return found
            await asyncio.sleep(0.05)
