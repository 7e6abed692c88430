"""Owns retries of one operation: which errors pass, how often it is tried again, and for how long.

Must not know what the operation is. Redis' own retry, and the controller's requests to the cluster, outlive a call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True)
class Retry:
    """Repeat an operation every `every_s` seconds while its error is one that `passes`.

    The error is raised once `for_s` seconds or `attempts` attempts are over, and at once if it does not pass. Each
    failure is logged, with what it is `about`, and given to `on_failure`.
    """

    passes: Callable[[Exception], bool]
    every_s: float
    for_s: float = math.inf
    attempts: float = math.inf
    on_failure: Callable[[Exception], None] = lambda _: None
    about: str = ""

    def run(self, do: Callable[[], R], sleep: Callable[[float], bool | None] = time.sleep) -> R:
        """The result of a blocking operation. `sleep` returns True to end the retries, as a set Event's `wait` does."""
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return do()
            except Exception as error:
                if not self._repeats(error, started, attempt) or sleep(self.every_s):
                    raise

    async def run_async(self, do: Callable[[], Awaitable[R]]) -> R:
        """The result of an asynchronous operation."""
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return await do()
            except Exception as error:
                if not self._repeats(error, started, attempt):
                    raise
            await asyncio.sleep(self.every_s)

    def _repeats(self, error: Exception, started: float, attempt: int) -> bool:
        """Whether the operation is repeated after this failure, which is then logged."""
        if not self.passes(error) or attempt >= self.attempts or time.monotonic() - started >= self.for_s:
            return False
        log.warning("%s; retry in %g s", f"{self.about}: {error}" if self.about else error, self.every_s)
        self.on_failure(error)
        return True
