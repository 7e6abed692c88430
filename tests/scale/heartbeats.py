"""Owns many heartbeats in one process, as if as many processes announced themselves.

Must not do any work for the run. `python -m tests.scale.heartbeats COUNT --run ID --redis URL`
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import AsyncExitStack

from services.contracts import ProcessInfo
from services.process.hosting import Context, main
from services.streams.state.heartbeat import HEARTBEAT_S, Heartbeat

SERVICE = "verifier"
"""Not the rollout fleet: the learner would send weights to its replicas and wait for them."""


class Announcer:
    """Announces `count` processes that are ready, besides itself."""

    name = SERVICE

    def __init__(self, count: int) -> None:
        self._count = count

    async def run(self, context: Context) -> None:
        """Announce until stopped. Real processes start at different times, so their heartbeats do not coincide."""
        async with AsyncExitStack() as held:
            for number in range(self._count):
                info = ProcessInfo(
                    id=f"{SERVICE}-{os.getpid()}-{number}",
                    service=SERVICE,
                    run=context.record.id,
                    host=context.host,
                    pid=os.getpid(),
                    metrics=f"{context.host}:1",
                    state="ready",
                    started_at=time.time(),
                )
                await held.enter_async_context(Heartbeat(context.redis, info))
                await asyncio.sleep(HEARTBEAT_S / self._count)
            await context.stopping.wait()


if __name__ == "__main__":
    count = int(sys.argv[1])
    sys.exit(main(lambda: Announcer(count), sys.argv[2:]))
