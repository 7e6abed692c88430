"""Owns what a stack with a foreign Redis stands on: a server of the suite's own, and the proxy before it.

Must not be used by stacks that bring their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.server import Server


@contextmanager
def proxied_server(folder: Path) -> Iterator[tuple[str, Any]]:
    """The server's own address, and the proxy through which the stack is to reach it."""
    from tests.chaos.proxy import Proxy

    with Server(folder) as server, Proxy(("127.0.0.1", server.port)) as proxy:
        yield server.url, proxy
