"""Owns the tests of which nodes a learner may leave: those that others leave it room for.

Must not start Ray; test_avoided_places.py does.
"""

from __future__ import annotations

from typing import Any

import pytest

# Ray, which hosting imports, emits its own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {"CPU": 2.0, "GPU": 1.0}


def node(name: str, gpus: float) -> dict[str, Any]:
    return {"NodeID": name, "Labels": {}, "Resources": {"CPU": 16.0, "GPU": gpus}}


def test_room_elsewhere_is_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.hosting.nodes import ranks

    monkeypatch.setattr(ranks, "role_nodes", lambda role: [node("a", 1), node("b", 2), node("c", 1)])
    monkeypatch.setattr(ranks, "may_grow", lambda role, nodes: False)
    free = {"a": {"CPU": 14.0}, "b": {"CPU": 14.0, "GPU": 1.0}, "c": {"CPU": 16.0, "GPU": 1.0}}
    monkeypatch.setattr(ranks, "available_resources", lambda: free)
    cases: dict[str, tuple[int, set[str], list[str] | None, bool]] = {
        "another run has one GPU of b": (3, {"a"}, ["a"], False),
        "two are left": (2, {"a"}, ["a"], True),
        "what the ranks have themselves is theirs": (3, {"a"}, ["a", "b"], True),
        "but not on the avoided node": (3, {"a", "c"}, ["a", "b"], False),
        "all that the nodes have": (3, {"a"}, None, True),
    }
    assert {
        name: ranks.room_elsewhere(wanted, NEEDS, avoided, own) for name, (wanted, avoided, own, _) in cases.items()
    } == {name: room for name, (*_, room) in cases.items()}
    del free["c"]
    assert not ranks.room_elsewhere(2, NEEDS, {"a"}, ["a"]), "a node that has just gone"
