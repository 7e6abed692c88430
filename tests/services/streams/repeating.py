"""Owns commands that a test repeats while it disturbs a server, and the wait until a read blocks there.

Must not disturb the server itself.
"""

import asyncio
import time


async def keep_at_it(do, until):
    """Repeat a command; how often it was done, and the longest it took."""
    count, longest = 0, 0.0
    while not until.is_set():
        began = time.monotonic()
        await do()
        count, longest = count + 1, max(longest, time.monotonic() - began)
        await asyncio.sleep(0.01)
    return count, longest


async def until_a_read_blocks(redis):
    """Until the server holds a read that waits for news."""
    ends = time.monotonic() + 90
    while (await redis.info("clients"))["blocked_clients"] == 0:
        assert time.monotonic() < ends, "no read blocks"
        await asyncio.sleep(0.02)
