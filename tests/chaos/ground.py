"""Owns what a stack stands on if it is not its own: the suite's Redis, a proxy in front of it, Sentinels, an S3 store.

Must not strike.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.chaos.server import Server
from tests.harness.free_ports import free_port
from tests.harness.servers.proxy import Proxy
from tests.harness.servers.s3_server import BUCKET, S3Server
from tests.harness.servers.watched_servers import Watched, watched_servers

R = TypeVar("R")
CALL_S = 20.0
EMBEDDED, PROXY, SENTINELS = "embedded", "proxy", "sentinels"
"""The Redis of a stack: its own, the suite's behind a proxy, or the primary that Sentinels name."""
DOWN_AFTER_MS = 5000
"""After how long a silent primary counts as dead; a stall of a busy machine must not."""
PREFIX = "chaos"
UNTRIMMED = ("--auto-aof-rewrite-percentage", "0")
"""The oracle looks for entries in the append-only file that were trimmed before they were read."""


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


@dataclass
class Ground:
    """What a stack stands on. `url`: the suite's own way to Redis, past the proxy; "": that of the stack itself.

    `redis_url`: what the stack gets, None if it starts its own Redis; `environment`: more variables of its processes.
    """

    url: str = ""
    redis_url: str | None = None
    proxy: ProxyThread | None = None
    watched: Watched | None = None
    store: S3Server | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def files(self, run: str, folder: Path) -> Path:
        """Where the durable files of a run are; `folder`: its own."""
        return folder if self.store is None else self.store.object(f"{PREFIX}/{run}")


@contextmanager
def ground(folder: Path, kind: str, *, store: bool = False) -> Iterator[Ground]:
    """Start it; `kind` is that of the Redis."""
    with ExitStack() as held:
        made = Ground()
        if kind == PROXY:
            server = held.enter_context(Server(folder / "valkey"))
            proxy = held.enter_context(ProxyThread(server.port))
            made = Ground(server.url, proxy.url, proxy)
        elif kind == SENTINELS:
            watched = held.enter_context(watched_servers(_empty(folder / "watched"), DOWN_AFTER_MS, *UNTRIMMED))
            made = Ground(watched.url, watched.url, watched=watched)
        if store:
            made.store = held.enter_context(S3Server(_empty(folder / "s3"), free_port()))
            made.environment = {**made.store.variables, "PENSTOCK_STORE": f"s3://{BUCKET}/{PREFIX}"}
        yield made


def _empty(folder: Path) -> Path:
    """A new folder, with the first number that is free."""
    number = 0
    while True:
        try:
            (made := folder.with_name(f"{folder.name}-{number}")).mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return made
