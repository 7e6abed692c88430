"""Owns the notice that something has happened in a run, from its stream of events.

Must not read what happened: the follower looks at the run itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_client.cli.terminal import print_note

if TYPE_CHECKING:
    from penstock_client.client import Client

POLL_S = 1.0
"""Between looks at the run where no stream of events says when to look."""
LOOK_S = 5.0
"""Between looks if nothing has happened: waits, heartbeats and counters are no events."""
SETTLE_S = 0.3
"""From a notice to the look, so that one look serves what happens at once."""
CLOSING_S = 0.5


class RunNotices:
    """Follows the stream of events of a run in a thread of its own, until the stream ends or is refused."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = run
        self._rung = threading.Event()
        self._closed = False
        self._told = False
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._listen, name=f"events of {run}", daemon=True)

    def open(self) -> None:
        """Start to listen, once."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self, tick: Callable[[], None]) -> None:
        """Return when it is time to look at the run again; `tick` is called about every POLL_S and may raise."""
        listening = self._thread.is_alive()
        ends = time.monotonic() + (LOOK_S if listening else POLL_S)
        while (left := ends - time.monotonic()) > 0:
            self._tell()
            tick()
            if not listening:
                time.sleep(min(left, POLL_S))
            elif self._rung.wait(min(left, POLL_S)):
                time.sleep(SETTLE_S)
                break
        self._rung.clear()

    def close(self) -> None:
        """Stop to listen; the thread ends with the stream, which of a run that has ended is at its end."""
        self._closed = True
        if self._thread.ident is not None:
            self._thread.join(CLOSING_S)

    def _listen(self) -> None:
        from penstock_client.errors import ApiError

        try:
            for _ in self._client.events(self._run):
                self._rung.set()
                if self._closed:
                    return
        except (ApiError, RuntimeError) as error:  # httpx raises the latter once the client is closed
            self._problem = str(error)
        finally:
            self._rung.set()

    def _tell(self) -> None:
        if self._problem is not None and not self._told:
            self._told = True
            print_note(f"no stream of events ({self._problem}): looking at the run every {POLL_S:g} s instead")
