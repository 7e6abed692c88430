"""Owns commands that a test repeats while it disturbs a server, and the wait until a read blocks there.

Must not disturb the server itself.
"""

import asyncio
import time


async def repeat(command, until):
    """Repeat a command until the event is set; returns how often it ran, and the longest that it took."""
    count, longest = 0, 0.0
    while not until.is_set():
        began = time.monotonic()
        await command()
        count, longest = count + 1, max(longest, time.monotonic() - began)
        await asyncio.sleep(0.01)
    return count, longest


async def until_a_read_blocks(redis):
    """Until a blocking read waits on the server."""
    ends = time.monotonic() + 90
    while (await redis.info("clients"))["blocked_clients"] == 0:
        assert time.monotonic() < ends, "no read blocks"
        await asyncio.sleep(0.02)
