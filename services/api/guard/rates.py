"""Owns the limits on how often one principal, and one address without a valid token, may ask.

Must not hold more than the last window's counts; each pod of the API counts for itself.
"""

from __future__ import annotations

import math
import time
from ipaddress import IPv6Address, ip_address

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter

FAILURES = RateLimitItemPerMinute(30)
"""Failed sign-ins of one address; later ones are answered with less work, and are not in the audit log."""
DENIALS = RateLimitItemPerMinute(60)
"""Denied requests of one address in the audit log."""
ALL_DENIALS = RateLimitItemPerMinute(600)
"""The same of all addresses together."""
NETWORK_BITS = 64
"""Of an IPv6 address; a client with one address has the whole network."""


class Rates:
    """Counts of one gateway."""

    def __init__(self) -> None:
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

    async def wait_s(self, item: RateLimitItem, *key: str) -> int | None:
        """Count one more. Seconds until one more is allowed, at least 1; None: this one is."""
        if await self._limiter.hit(item, *key):
            return None
        stats = await self._limiter.get_window_stats(item, *key)
        return max(1, math.ceil(stats.reset_time - time.time()))


def network_of(address: str) -> str:
    """What is counted as one client: an IPv4 address, or an IPv6 network."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        bits = int(found) >> (128 - NETWORK_BITS)
        return str(found.ipv4_mapped or IPv6Address(bits << (128 - NETWORK_BITS)))
    return str(found)
