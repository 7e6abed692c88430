"""Owns what must be read while a run's streams exist: how many entries each has had, and which are unacked.

Must not import the code under test. A run that succeeds deletes most of its streams, and a rewind restarts them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import redis

from tests.chaos.lookups import READERS, STREAMS, key

EVERY_S = 0.5
JOIN_S = 60.0
MOST = 100_000


@dataclass
class Seen:
    """One stream, as last read. `added`: how many entries it has had, restarts included.

    `restarted`: whether it was deleted, at the run's end or by a rewind, or lost entries in a failover; then `added` is
    a lower bound. `unacked`: entries that its consumer group had not acked at `at` (milliseconds of Redis' clock).
    """

    added: int = 0
    restarted: bool = False
    unacked: set[str] = field(default_factory=set)
    at: int = 0
    current: int = 0
    server: str = ""

    def note(self, added: int, server: str = "") -> None:
        """Note how many entries the stream has had since its last restart, by the count of this server.

        `server`: the id of its replication history, which changes when it is promoted, restarted or synced again.
        """
        promoted, self.server = server != self.server, server
        if added < self.current:
            self.restarted = True
            # What a promoted replica lacks was not added; it counts what it has from the start.
            self.added -= self.current if promoted else 0
            self.current = 0
        self.added += added - self.current
        self.current = added


class Watch:
    """Reads the streams of a run twice a second, in a thread, until it is closed."""

    def __init__(self, server: Any, run: str) -> None:
        self._server = server
        self._run = run
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"watch of {run}", daemon=True)
        self.seen = {name: Seen() for name in STREAMS}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(JOIN_S)

    def close(self) -> None:
        """Stop, and read the streams one last time."""
        self.__exit__()
        self.look()

    def _main(self) -> None:
        while not self._closing.wait(EVERY_S):
            try:
                self.look()
            except redis.exceptions.RedisError:
                time.sleep(EVERY_S)  # a fault has hit Redis; what was read last remains valid

    def look(self) -> None:
        """Read the state of every stream."""
        for name, seen in self.seen.items():
            with self._server.pipeline(transaction=True) as pipe:  # all three of the same server
                pipe.time().info("replication").xinfo_stream(key(self._run, name))
                (seconds, micros), about, stream = pipe.execute(raise_on_error=False)
            if isinstance(stream, redis.exceptions.ResponseError):
                if "no such key" not in str(stream):
                    raise stream
                seen.note(0, about["master_replid"])
                continue
            seen.note(int(stream["entries-added"]), about["master_replid"])
            if name in READERS:
                seen.unacked = self._unacked(name)
                seen.at = seconds * 1000 + micros // 1000

    def _unacked(self, stream: str) -> set[str]:
        """Entries that are delivered and not acked, and those not delivered yet."""
        name, reader = key(self._run, stream), READERS[stream]
        groups = [group for group in self._server.xinfo_groups(name) if group["name"].decode() == reader]
        after = f"({groups[0]['last-delivered-id'].decode()}" if groups else "-"
        new = {entry.decode() for entry, _ in self._server.xrange(name, min=after)}
        held = self._server.xpending_range(name, reader, "-", "+", MOST) if groups else []
        return new | {entry["message_id"].decode() for entry in held}
