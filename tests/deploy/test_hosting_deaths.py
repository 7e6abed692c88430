"""Owns the tests of which deaths count as early: the limit on restarting processes.

Must not start a process.
"""

from __future__ import annotations

import pytest

# Ray, which hosting imports, emits warnings that are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_only_replicas_that_never_were_ready_count() -> None:
    from deploy.hosting.fleet import Replacements

    a, b, c, d, e = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.2", 1), ("10.0.0.1", 4), ("10.0.0.1", 5)
    replacements = Replacements()
    assert replacements.observe({"a": a, "b": None}, ready={a}) == 0
    assert replacements.observe({"a": a, "b": b}, ready={a}) == 0
    assert replacements.observe({"c": c, "b": b}, ready={a}) == 0, "a was ready"
    assert replacements.observe({"d": d, "b": b}, ready={a}) == 1, (
        "c was never ready: a process on another host had its id"
    )
    assert replacements.observe({"d": d, "e": None}, ready=set()) == 2
    assert replacements.observe({"d": d, "e": e}, ready={e}) == 0, "e is ready, so replacing helps"
    replacements.leaving = 1
    assert replacements.observe({"e": e}, ready={e}) == 0, "the fleet was scaled down"
    assert replacements.observe({}, ready=set()) == 0


def test_only_actors_that_never_were_ready_count() -> None:
    from deploy.hosting.actors import ActorState, Restarts

    def alive(restarts: int, pid: int) -> ActorState:
        return ActorState(alive=True, dead=False, restarts=restarts, process=("10.0.0.1", pid))

    def between(restarts: int) -> ActorState:
        return ActorState(alive=False, dead=False, restarts=restarts, process=None)

    restarts = Restarts()
    assert restarts.observe(alive(20, 1), ready=()) == 0, "earlier restarts do not count"
    assert restarts.observe(between(21), ready=()) == 1
    assert restarts.observe(alive(22, 3), ready=()) == 2
    assert restarts.observe(between(23), ready={("10.0.0.1", 3)}) == 0, "it was ready when it died"
    assert restarts.observe(alive(23, 4), ready={("10.0.0.1", 3)}) == 0
    assert restarts.observe(between(24), ready={("10.0.0.2", 4)}) == 1, "a process on another host has that id"
