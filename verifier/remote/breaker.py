"""Owns the circuit breaker: whether a service that failed several times in a row gets a request now.

Must not send a request or wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verifier.remote.faults import ServiceFaultError

log = logging.getLogger(__name__)


class CircuitBreaker:
    """After `failures` failed requests in a row none is sent for `pause_s` seconds; then one, whose outcome decides.

    `clock`: monotonic seconds. Failures of requests that were already in flight when it opened change nothing.
    """

    def __init__(
        self, service: str, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._failures = failures
        self._pause_s = pause_s
        self._clock = clock
        self._in_a_row = 0
        self._open_until: float | None = None
        self._probing = False
        self._last_fault = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Send one request inside; its error decides. Raises ServiceFaultError instead while no request may be sent.

        An error that does not blame the service counts as an answer; a cancelled request as no request.
        """
        probe = self._admit()
        try:
            yield
        except ServiceFaultError as fault:
            if fault.blamed:
                self._failed(probe, str(fault))
            else:
                self._answered(probe)
            raise
        else:
            self._answered(probe)
        finally:
            self._probing = self._probing and not probe

    def _admit(self) -> bool:
        """Whether this request is the probe of an open breaker."""
        if self._open_until is None:
            return False
        left = self._open_until - self._clock()
        if left > 0 or self._probing:
            when = f"for another {left:.1f} s" if left > 0 else "until a first one has succeeded"
            raise ServiceFaultError(
                f"{self._service}: no request is sent {when}, after {self._failures} failures in a row; "
                f"the last one: {self._last_fault}",
                unspent=True,
            )
        self._probing = True
        return True

    def _failed(self, probe: bool, fault: str) -> None:
        self._last_fault = fault.removeprefix(f"{self._service}: ")
        self._in_a_row += 1
        if probe or (self._open_until is None and self._in_a_row >= self._failures):
            self._open_until = self._clock() + self._pause_s
            log.error(
                "%s: no request is sent for %g s, after %d failures in a row; the last one: %s",
                self._service,
                self._pause_s,
                self._in_a_row,
                self._last_fault,
            )

    def _answered(self, probe: bool) -> None:
        if probe or self._open_until is None:
            self._in_a_row = 0
        if probe:
            self._open_until = None
            log.warning("%s: it answers again; requests are sent again", self._service)
