"""Owns the oracle's own record of a run: every entry of every stream, read by XREAD into a file as it appears.

Must not import the code under test, or interpret a message.

It is a separate process, with real-time priority if the machine permits: a judged sample is trimmed from its stream a
few milliseconds after it was announced, and must be read before that. One JSON object per line: an entry {"stream",
"id", "at", "m", "more"}, an outage {"outage", "from", "until"}, and last {"end": {STREAM: COUNT}}, the number of
entries of each stream in this file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.lookups import BODY, STREAMS, connection, key

BLOCK_MS = 200
COUNT = 500
RETRY_S = 0.01
"""Between two attempts to reach a server that is down; short, so that the tail reads before the services do."""
END_S = 60.0
START_S = 30.0
ROOT = Path(__file__).parents[2]
DOWN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.BusyLoadingError)


class TailBrokenError(RuntimeError):
    """The tail could not follow its streams to the end."""


class Tail:
    """Follows one run's streams from their first entry until it is closed."""

    def __init__(self, url: str, run: str, path: Path) -> None:
        self._command = [sys.executable, "-m", __name__, url, run, str(path.absolute())]
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Tail:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        if not ready or not self._process.stdout.readline():
            self.__exit__()
            raise TailBrokenError(f"the tail of {self._run} did not start within {START_S:g} s")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def close(self) -> None:
        """Read the remaining entries. Raises TailBrokenError."""
        assert self._process is not None
        try:
            self._process.communicate(timeout=2 * END_S)
        except subprocess.TimeoutExpired:
            raise TailBrokenError(f"the tail of {self._run} did not end within {2 * END_S:g} s") from None
        if self._process.returncode:
            raise TailBrokenError(f"the tail of {self._run} ended with {self._process.returncode}")


class Follower:
    """The work of the tail's process; it writes lines to `file`."""

    def __init__(self, url: str, run: str, file: IO[str]) -> None:
        self._url = url
        self._run = run
        self._file = file
        self._after: dict[Any, Any] = {key(run, name): "0-0" for name in STREAMS}
        self._names = {key(run, name).encode(): name for name in STREAMS}
        self._read = dict.fromkeys(STREAMS, 0)
        self._server: Any = None
        self._lost_at: float | None = None

    def step(self) -> int:
        """Read once; returns the number of entries. Retries a server that is down."""
        try:
            if self._server is None:
                self._server = connection(self._url, Retry(NoBackoff(), 0), 1, 30)
            reply = self._server.xread(self._after, count=COUNT, block=BLOCK_MS) or []
        except DOWN:
            self._lost_at = self._lost_at or time.time()
            self._disconnect()
            time.sleep(RETRY_S)
            return 0
        if self._lost_at is not None:
            self._write({"outage": True, "from": self._lost_at, "until": time.time()})
            self._lost_at = None
        if not reply:
            self._file.flush()
        return sum(self._keep(stream, entries) for stream, entries in reply)

    def _keep(self, stream: bytes, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> int:
        name = self._names[stream]
        for entry, fields in entries:
            more = {field.decode(errors="replace"): len(value) for field, value in fields.items() if field != BODY}
            body = fields.get(BODY, b"").decode(errors="surrogateescape")
            self._write({"stream": name, "id": entry.decode(), "at": time.time(), "m": body, "more": more})
        self._after[stream.decode()] = entries[-1][0]
        self._read[name] += len(entries)
        return len(entries)

    def end(self) -> None:
        """Read until the streams have no more entries, then write the counts. Raises TailBrokenError."""
        ends = time.monotonic() + END_S
        while time.monotonic() < ends:
            if self.step() == 0 and self._server is not None:
                self._write({"end": self._read})
                return
        raise TailBrokenError(f"reading did not finish within {END_S:g} s: entries kept arriving, or Redis stayed down")

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def raise_priority() -> str | None:
    """Request real-time priority; returns the reason if that is not possible, else None."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError) as error:
        return f"no real-time priority: {error}"
    return None


def main(url: str, run: str, path: str) -> None:
    """Follow until standard input is closed, which also happens when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    refusal = raise_priority()
    if refusal:
        print(f"tail: {refusal}; entries may be trimmed before they are read", file=sys.stderr, flush=True)
    with Path(path).open("a", encoding="utf-8") as file:
        follower = Follower(url, run, file)
        follower.step()
        print("following", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            follower.step()
        follower.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
