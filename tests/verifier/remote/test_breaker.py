"""The circuit breaker, by a clock of the test."""

from __future__ import annotations

import asyncio

import pytest

from verifier.remote.breaker import CircuitBreaker
from verifier.remote.faults import ServiceFaultError


class Tried:
    """A breaker of two failures and 30 seconds, and the time that it reads."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = CircuitBreaker("svc", 2, 30.0, lambda: self.now)

    def fail(self, blamed: bool = True) -> None:
        with pytest.raises(ServiceFaultError, match="boom"), self.breaker.watching():
            raise ServiceFaultError("svc: boom", blamed=blamed)

    def succeed(self) -> None:
        with self.breaker.watching():
            pass

    def refused(self) -> str:
        with pytest.raises(ServiceFaultError, match="no request is sent") as caught, self.breaker.watching():
            pytest.fail("it was let through")
        return str(caught.value)


def test_only_failures_in_a_row_open_it() -> None:
    tried = Tried()
    for _ in range(5):
        tried.fail()
        tried.succeed()
    tried.fail()
    tried.fail()
    assert tried.refused() == (
        "svc: no request is sent for another 30.0 s, after 2 failures in a row; the last one: boom"
    )


def test_faults_of_a_text_do_not_open_it() -> None:
    tried = Tried()
    for _ in range(5):
        tried.fail(blamed=False)
    tried.succeed()


def test_one_probe_decides() -> None:
    tried = Tried()
    tried.fail()
    tried.fail()
    tried.now += 30
    with tried.breaker.watching():
        assert "until a first one has succeeded" in tried.refused()
    tried.succeed()
    tried.fail()
    tried.succeed()


def test_a_failed_probe_opens_it_again() -> None:
    tried = Tried()
    tried.fail()
    tried.fail()
    tried.now += 30
    tried.fail()
    tried.now += 29
    tried.refused()
    tried.now += 1
    tried.succeed()


def test_a_cancelled_probe_leaves_room_for_another() -> None:
    tried = Tried()
    tried.fail()
    tried.fail()
    tried.now += 30
    with pytest.raises(asyncio.CancelledError), tried.breaker.watching():
        raise asyncio.CancelledError
    tried.succeed()


def test_answers_from_before_it_opened_change_nothing() -> None:
    tried = Tried()
    with tried.breaker.watching():
        tried.fail()
        tried.fail()
    tried.refused()
