"""Owns what a stack with a foreign Redis stands on: a server of the suite's own, and the proxy before it.

Must not be used by stacks that bring their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.chaos.server import Server
from tests.harness.servers.proxy import Proxy

R = TypeVar("R")
CALL_S = 20.0


class ProxyThread:
    """A proxy that works in a thread of its own, with methods that anybody may call. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self._proxy = Proxy("127.0.0.1", port)
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        if not self._begun.wait(CALL_S):
            raise RuntimeError(f"the proxy did not begin within {CALL_S:g} s")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CALL_S)

    def _main(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with self._proxy:
            self._begun.set()
            await self._closing.wait()

    @property
    def url(self) -> str:
        """Where the stack is to look for Redis."""
        return f"redis://127.0.0.1:{self._proxy.port}/0"

    def _call(self, work: Callable[[], R]) -> R:
        async def there() -> R:
            return work()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(CALL_S)

    def drop(self) -> int:
        """Reset every connection; how many there were."""
        return self._call(self._proxy.drop_all)

    def swallow(self) -> int:
        """Let every connection that exists carry nothing any more; how many those are."""
        return self._call(self._proxy.swallow)

    def delay(self, seconds: float) -> None:
        """Hold every chunk back for that long; 0 ends it."""
        self._call(lambda: self._proxy.delay(seconds))

    def refuse(self, seconds: float) -> None:
        """Reset whoever connects within that time."""
        self._call(lambda: self._proxy.refuse(seconds))


@contextmanager
def proxied_server(folder: Path) -> Iterator[tuple[str, ProxyThread]]:
    """The server's own address, and the proxy through which the stack is to reach it."""
    with Server(folder) as server, ProxyThread(server.port) as proxy:
        yield server.url, proxy
