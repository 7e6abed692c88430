"""Owns the tests of which nodes a learner may leave: those that others leave it room for.

Must not start Ray; test_avoided_places.py does.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from services.settings import parse_recipe
from services.streams.runs.places import AvoidedPlace
from tests.harness.small_run import recipe_document

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


async def test_ranks_leave_again_once_a_node_is_avoided_again(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment without room elsewhere must not keep the learner on avoided nodes for the rest of the run."""
    from deploy.hosting import cluster as hosting

    record = SimpleNamespace(id=run_id, recipe=parse_recipe(recipe_document("/nowhere")))
    cluster, full, tries = hosting.RayCluster(""), [True], list[str]()

    async def start(run: str, ranks: list[Any], redis: str, deadline_s: float) -> None:
        tries.append(ranks[0])
        if full[0] and ranks[0] == "apart":
            raise TimeoutError

    async def end(run: str) -> None:
        pass

    for name, stand_in in {
        "start_ranks": start,
        "end_ranks": end,
        "named_actors": lambda prefix: [],
        "rank_needs": lambda record: NEEDS,
        "ranks_of": lambda record, selector: ["apart" if selector else "anywhere"],
    }.items():
        monkeypatch.setattr(hosting, name, stand_in)
    monkeypatch.setattr(hosting.learner_nodes, "leave", lambda places: None)
    monkeypatch.setattr(hosting.learner_nodes, "selector", lambda ranks, needs, places: {"node": "!in(a)"})
    nothing: Any = None
    cluster._placed[run_id] = hosting._Placed(nothing, nothing, nothing)

    async def placed_after(*places: AvoidedPlace) -> list[str]:
        tries.clear()
        await cluster.avoid(run_id, places)
        await cluster.restart_learner(record)  # type: ignore[arg-type]
        return list(tries)

    now = time.time()
    first = AvoidedPlace(service="learner", node="a", count=3, reason="ranks failed", until=now + 60)
    other = first.model_copy(update={"service": "rollout"})
    assert await placed_after(first) == ["apart", "anywhere"]
    full[0] = False
    assert await placed_after(first) == ["anywhere"], "nothing is known that is new"
    assert await placed_after(first, other) == ["anywhere"], "a place of another service"
    assert await placed_after(first.model_copy(update={"until": now + 90}), other) == ["apart"]
    full[0] = True
    second = first.model_copy(update={"node": "b"})
    assert await placed_after(first, second) == ["apart", "anywhere"]
    full[0] = False
    assert await placed_after(first) == ["apart"], "the time of one is over"
