"""Owns the Redis of a stack that does not start its own: the suite's server, and the proxy in front of it.

Must not be used by stacks with an embedded Redis.
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
    """A proxy in a separate thread; its methods may be called from any thread. Use as a context manager."""

    def __init__(self, port: int) -> None:
        self._proxy = Proxy("127.0.0.1", port)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        if not self._started.wait(CALL_S):
            raise RuntimeError(f"the proxy did not start within {CALL_S:g} s")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CALL_S)

    def _main(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with self._proxy:
            self._started.set()
            await self._closing.wait()

    @property
    def url(self) -> str:
        """The URL that the stack gets for Redis."""
        return f"redis://127.0.0.1:{self._proxy.port}/0"

    def _call(self, work: Callable[[], R]) -> R:
        async def there() -> R:
            return work()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(CALL_S)

    def drop(self) -> int:
        """Reset every connection; returns how many there were."""
        return self._call(self._proxy.drop_all)

    def swallow(self) -> int:
        """Stop the traffic of every existing connection, without closing it; returns how many there are."""
        return self._call(self._proxy.swallow)

    def delay(self, seconds: float) -> None:
        """Delay every chunk by `seconds`; 0 ends the delay."""
        self._call(lambda: self._proxy.delay(seconds))

    def refuse(self, seconds: float) -> None:
        """Reset every new connection for `seconds`."""
        self._call(lambda: self._proxy.refuse(seconds))


@contextmanager
def proxied_server(folder: Path) -> Iterator[tuple[str, ProxyThread]]:
    """The server's own URL, and the proxy through which the stack reaches it."""
    with Server(folder) as server, ProxyThread(server.port) as proxy:
        yield server.url, proxy
