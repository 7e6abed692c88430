"""Owns a minimal service for tests of hosting.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio

from services.process.hosting import Context


class EchoService:
    """Announces itself, waits until it is stopped, and writes an event when it has drained.

    With `fails` it raises instead, after it is ready or, if `gets_ready` is False, before. With `child` it starts a
    child process, like the engine of a rollout replica.
    """

    def __init__(self, name: str, fails: str = "", child: bool = False, gets_ready: bool = True) -> None:
        self.name = name
        self._fails = fails
        self._child = child
        self._gets_ready = gets_ready

    async def run(self, context: Context) -> None:
        child = await asyncio.create_subprocess_exec("sleep", "600") if self._child else None
        if self._gets_ready:
            await context.heartbeat.update(state="ready")
        if self._fails:
            await asyncio.sleep(0.2)
            raise RuntimeError(self._fails)
        await context.stopping.wait()
        if child:
            child.terminate()
            await child.wait()
        await context.event_log.write("drained", context.heartbeat.info.id)


def echo(name: str, child: bool = False, fails: str = "", gets_ready: bool = True) -> EchoService:
    """A factory for hosting; fix its arguments with functools.partial."""
    return EchoService(name, fails, child, gets_ready)
