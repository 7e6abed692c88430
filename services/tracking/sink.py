"""Owns the interface of a sink, and the thread in which its calls run with a deadline.

Must not know a tracker's library.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from services.tracking.rows import RunEnding, TrackCursor, TrackedFacts, TrackedRow

log = logging.getLogger(__name__)

R = TypeVar("R")

REASON_CHARACTERS = 300


class Sink(Protocol):
    """One tracker. Its calls may block, raise anything and hang; they are made one after another in one thread.

    A sink is opened once. After an error it is closed, and another one is opened in its place.
    """

    def open(self, facts: TrackedFacts) -> TrackCursor | None:
        """Connect, and return the cursor after the newest row that the tracker holds; None: it holds none."""

    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Write rows, in order, each together with its cursor."""

    def close(self, ending: RunEnding | None) -> None:
        """Write how the run ended (None: it has not), and release everything."""


class SinkError(RuntimeError):
    """A call of a sink failed or took too long; one line. `lasting`: it would fail again in this process."""

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting


class SinkThread:
    """The thread of one sink. It is a daemon: a call that hangs keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._current: Future[Any] | None = None
        self._what = ""
        threading.Thread(target=self._work, name=f"sink-{name}", daemon=True).start()

    def _work(self) -> None:
        while True:
            future, function = self._jobs.get()
            try:
                result = function()
            except BaseException as error:  # a library may end its thread, which must not look like a hang
                log.info("a call of this sink failed", exc_info=True)
                future.set_exception(error)
            else:
                future.set_result(result)

    @property
    def busy(self) -> bool:
        """Whether a call has not returned, also after its deadline."""
        return self._current is not None and not self._current.done()

    async def call(self, what: str, function: Callable[..., R], *arguments: Any, deadline_s: float) -> R:
        """The result of a call. Raises SinkError when it fails, is not done in time, or the previous one hangs."""
        if self.busy:
            raise SinkError(f"{self._what} has not returned")
        self._what = what
        future = self._current = Future[R]()
        future.set_running_or_notify_cancel()
        self._jobs.put((future, lambda: function(*arguments)))
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not future.done():
                raise SinkError(f"{what} has not returned within {deadline_s:g} s") from None
            raise SinkError(f"{what} failed: {_one_line(error)}") from error
        except ImportError as error:
            raise SinkError(f"{what} failed: {_one_line(error)}", lasting=True) from error
        except (Exception, SystemExit) as error:
            raise SinkError(f"{what} failed: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """The first line of an error, cut: those of servers may be pages long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:REASON_CHARACTERS] if lines else type(error).__name__
