"""Owns the tests of which deaths count as early: the limit on restarting processes.

Must not start a process.
"""

from __future__ import annotations

import pytest

# Ray, which hosting imports, emits its own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_only_replicas_that_were_never_ready_count() -> None:
    from deploy.hosting.fleet import Replacements

    a, b, c, d, e = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.2", 1), ("10.0.0.1", 4), ("10.0.0.1", 5)
    replacements = Replacements()
    assert replacements.observe({"a": a, "b": None}, ready={a}) == 0
    assert replacements.observe({"a": a, "b": b}, ready={a}) == 0
    assert replacements.observe({"c": c, "b": b}, ready={a}) == 0, "a was ready"
    assert replacements.observe({"d": d, "b": b}, ready={a}) == 1, (
        "c was never ready: the ready process with its id is on another host"
    )
    assert replacements.observe({"d": d, "e": None}, ready=set()) == 2
    assert replacements.observe({"d": d, "e": e}, ready={e}) == 0, "e is ready, so replacing helps"
    replacements.leaving = 1
    assert replacements.observe({"e": e}, ready={e}) == 0, "the fleet was scaled down"
    assert replacements.observe({}, ready=set()) == 0


def test_only_actors_that_were_never_ready_count() -> None:
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
    assert restarts.observe(between(24), ready={("10.0.0.2", 4)}) == 1, (
        "the ready process with that id is on another host"
    )
