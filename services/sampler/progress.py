"""Owns the sampler's patience: how long it waits for verdicts, and for a group that can be kept.

Must not act; it raises, and names what is waited for.
"""

from __future__ import annotations

import time

from services.shell import Context
from services.streams.presence import live_processes

TOLD_EVERY_S = 60.0


class SamplingStalledError(RuntimeError):
    """Nothing came within limits.stall_timeout_s; names what is being waited for."""


class Progress:
    """A lane's patience: one clock for verdicts, one for kept groups.

    Both start when a replica can generate and another can judge.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._patience_s = context.record.recipe.limits.stall_timeout_s
        self._working = False
        self._heard = self._kept = self._told = time.monotonic()

    def heard(self) -> None:
        """A verdict came."""
        self._heard = time.monotonic()

    def kept(self) -> None:
        """A group was kept, or none is wanted."""
        self._kept = self._told = time.monotonic()

    async def check(self, waiting: str) -> None:
        """Raise SamplingStalledError when either clock has run out; `waiting` says what for. Call it often."""
        now = time.monotonic()
        if not self._working:
            processes = await live_processes(self._context.redis, self._context.keys.run)
            ready = {one.service for one in processes if one.state == "ready"}
            self._working = {"rollout", "verifier"} <= ready
            self._heard = self._kept = self._told = now
        if now - self._heard > self._patience_s:
            raise SamplingStalledError(f"no verdict for {self._patience_s:g} s; waiting for {waiting}")
        if now - self._kept > self._patience_s:
            raise SamplingStalledError(
                f"every group was filtered for {self._patience_s:g} s (limits.stall_timeout_s): all answers are right, "
                f"or all wrong; waiting for {waiting}"
            )
        if now - self._told > TOLD_EVERY_S:
            self._told = now
            await self._context.journal.event("starving", f"no group kept for {now - self._kept:.0f} s: {waiting}")
