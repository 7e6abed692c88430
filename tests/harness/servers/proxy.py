"""Owns a TCP proxy that drops, delays and refuses connections on request.

Must not interpret the bytes.
"""

from __future__ import annotations

import asyncio
import time

from services.waits import cancel_and_wait

CHUNK = 65536


class _Link:
    """One connection through the proxy, both ways."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._ends = (near, far)
        self.mute = False

    def abort(self) -> None:
        for end in self._ends:
            end.transport.abort()


class Proxy:
    """Forwards bytes between its own port and `host:port`. Use as an asynchronous context manager.

    Faults last until they are undone, or for the given seconds; several can be active at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._delay_s = 0.0
        self._refuses_until = 0.0
        self.port = 0
        self.accepted = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop_all()
        await cancel_and_wait(*self._tasks)
        await self._server.wait_closed()

    def drop_all(self) -> int:
        """Reset every connection; returns how many there were. New ones are accepted."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    def swallow(self) -> int:
        """Stop the traffic of every existing connection, which stays open; returns how many there are."""
        for link in self._links:
            link.mute = True
        return len(self._links)

    def delay(self, seconds: float) -> None:
        """Delay every chunk by `seconds`, in both directions; 0 ends the delay."""
        self._delay_s = seconds

    def refuse(self, seconds: float) -> None:
        """Reset new connections for `seconds`; existing connections continue."""
        self._refuses_until = time.monotonic() + seconds

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if time.monotonic() < self._refuses_until:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:  # the target does not listen: the client sees the same
            writer.transport.abort()
            return
        link = _Link(writer, far_writer)
        self._links.add(link)
        try:
            await asyncio.gather(self._pump(link, reader, far_writer), self._pump(link, far_reader, writer))
        finally:
            link.abort()
            self._links.discard(link)

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until it is closed, then close the other end."""
        try:
            while chunk := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if not link.mute:
                    writer.write(chunk)
                    await writer.drain()
        except OSError:
            link.abort()
        else:
            if not link.mute:
                writer.close()
