"""Owns the oracle's own record of a run: every entry of every stream, read by XREAD into a file as it appears.

Must not import the code under test, nor understand a message.

One JSON object a line: an entry {"stream", "id", "at", "m", "more"}, an outage {"outage", "from", "until"}, and at the
end {"end": {STREAM: {"added", "read"}}}: how many entries each stream ever had and how many of them are in this file.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.lookups import BODY, STREAMS, key

BLOCK_MS = 200
COUNT = 500
AGAIN_S = 0.01
"""Between two attempts to reach a server that is down: readers must not get far ahead of us when it is back."""
END_S = 60.0


class TailBrokenError(RuntimeError):
    """The tail could not follow its streams to the end."""


class Tail:
    """Follows one run's streams from their first entry until it is closed. Starts as a thread of its own."""

    def __init__(self, url: str, run: str, path: Path) -> None:
        self._url = url
        self._run = run
        self._path = path
        self._after = {key(run, name): "0-0" for name in STREAMS}
        self._names = {key(run, name).encode(): name for name in STREAMS}
        self._read = dict.fromkeys(STREAMS, 0)
        self._server: Any = None
        self._lost_at: float | None = None
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"tail of {run}", daemon=True)

    def __enter__(self) -> Tail:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(2 * END_S)

    def close(self) -> None:
        """Read what is left, and write down whether that is everything. Raises TailBrokenError."""
        self._closing.set()
        self._thread.join(2 * END_S)
        if self._thread.is_alive():
            raise TailBrokenError(f"the tail of {self._run} did not end within {2 * END_S:g} s")
        if self._error is not None:
            raise TailBrokenError(f"the tail of {self._run} broke: {self._error!r}") from self._error

    def _main(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                while not self._closing.is_set():
                    self._step(file)
                self._end(file)
        except BaseException as error:  # noqa: BLE001 - it is raised again by close()
            self._error = error
        finally:
            self._disconnect()

    def _step(self, file: IO[str]) -> int:
        """Read once; how many entries came. A server that is down is tried again."""
        try:
            if self._server is None:
                self._server = redis.Redis.from_url(
                    self._url, protocol=2, socket_connect_timeout=1, socket_timeout=30, retry=Retry(NoBackoff(), 0)
                )
            reply = self._server.xread(self._after, count=COUNT, block=BLOCK_MS) or []
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.BusyLoadingError):
            self._lost_at = self._lost_at or time.time()
            self._disconnect()
            time.sleep(AGAIN_S)
            return 0
        if self._lost_at is not None:
            _write(file, {"outage": True, "from": self._lost_at, "until": time.time()})
            self._lost_at = None
        return sum(self._keep(file, stream, entries) for stream, entries in reply)

    def _keep(self, file: IO[str], stream: bytes, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> int:
        name = self._names[stream]
        for entry, fields in entries:
            more = {one.decode(errors="replace"): len(value) for one, value in fields.items() if one != BODY}
            body = fields.get(BODY, b"").decode(errors="surrogateescape")
            _write(file, {"stream": name, "id": entry.decode(), "at": time.time(), "m": body, "more": more})
        file.flush()
        self._after[stream.decode()] = entries[-1][0].decode()
        self._read[name] += len(entries)
        return len(entries)

    def _end(self, file: IO[str]) -> None:
        ends = time.monotonic() + END_S
        while time.monotonic() < ends:
            came = self._step(file)
            if came or self._server is None:
                continue
            try:
                added = {name: self._added(name) for name in STREAMS}
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                self._disconnect()
                continue
            # Nothing may have come between the last read and this look.
            if self._step(file) == 0 and self._server is not None:
                counts = {name: {"added": added[name], "read": self._read[name]} for name in STREAMS}
                _write(file, {"end": counts})
                return
        raise TailBrokenError(f"the streams did not come to rest within {END_S:g} s, or Redis did not come back")

    def _added(self, name: str) -> int:
        """How many entries the stream has ever had, trimmed and deleted ones too."""
        try:
            return int(self._server.xinfo_stream(key(self._run, name))["entries-added"])
        except redis.exceptions.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return 0

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _write(file: IO[str], line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
