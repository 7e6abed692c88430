"""With how many threads an engine on CPUs computes, by what the last second was like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout.processes.spare_cores import HOLD_S, CoreUsage, SpareCores

START = CoreUsage(at=100.0, idle=50.0, computed=7.0, waited=1.0)


class Seconds:
    """Passes seconds of a machine; each call says what one was like, and returns the threads after it."""

    def __init__(self, least: int, most: int) -> None:
        self._usage = START
        self._cores = SpareCores(least, most, START)

    def __call__(self, *, idle: float, computed: float, waited: float = 0.0) -> int:
        before = self._usage
        self._usage = CoreUsage(before.at + 1, before.idle + idle, before.computed + computed, before.waited + waited)
        return self._cores.next(self._usage)


def test_a_busy_engine_takes_idle_cores() -> None:
    second = Seconds(1, 4)
    assert second(idle=0.3, computed=0.9) == 1
    assert second(idle=0.9, computed=0.9) == 2
    assert second(idle=2.2, computed=1.9) == 4
    assert second(idle=3.0, computed=3.9) == 4


def test_what_others_compute_ends_it_for_a_while() -> None:
    second = Seconds(1, 2)
    assert second(idle=1.0, computed=0.9) == 2
    assert second(idle=0.0, computed=1.8, waited=0.2) == 2  # Redis and the like
    assert second(idle=0.3, computed=1.5, waited=0.4) == 2  # threads that were woken
    assert second(idle=0.0, computed=1.4, waited=0.6) == 1
    for _ in range(int(HOLD_S) - 1):
        assert second(idle=1.0, computed=0.9) == 1
    assert second(idle=1.0, computed=0.9) == 2


def test_waits_for_its_own_threads_cost_nothing() -> None:
    """An engine with its own number of threads only has nothing to give back."""
    second = Seconds(2, 3)
    assert second(idle=0.0, computed=1.4, waited=0.6) == 2
    assert second(idle=0.8, computed=1.9) == 3


def test_an_idle_engine_takes_no_cores_and_keeps_none() -> None:
    second = Seconds(1, 2)
    assert second(idle=2.0, computed=0.1) == 1
    assert second(idle=1.0, computed=0.9) == 2
    assert second(idle=1.8, computed=0.2) == 1


def test_two_looks_at_once_change_nothing() -> None:
    cores = SpareCores(1, 2, START)
    assert cores.next(replace(START, idle=START.idle + 1)) == 1


def test_this_process_has_computed() -> None:
    before = CoreUsage.now()
    if before is None:
        pytest.fail("this kernel does not count waits: rollout.max_threads has no effect on it")
    sum(range(10**6))
    after = CoreUsage.now()
    assert after is not None
    assert after.at > before.at
    assert after.computed > before.computed
    assert after.idle >= before.idle
    assert after.waited > 0
