"""Owns the tests of which deaths count as early: the limit on restarting processes.

Must not start a process.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from deploy.hosting.nodes.deaths import (
    EARLY_DEATHS,
    MOST_DEATHS,
    PLACE_TRIES,
    STUCK_S,
    EarlyDeaths,
    Rooms,
    SeenReplica,
)
from services.contracts import HostPid
from services.settings.cluster_limits import VARIABLE
from services.streams.runs.places import Location

# Ray, which hosting imports, emits its own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def replicas(**places: str | None) -> dict[str, SeenReplica]:
    """Replicas by name. A place is written as NODE/DEVICE; the process of `a1` is number 1 of host a."""
    found = {}
    for name, where in places.items():
        place = Location(*where.split("/")) if where else None
        found[name] = SeenReplica((name[0], int(name[1:])) if where else None, place)
    return found


def die(deaths: EarlyDeaths, where: str, times: int, avoided: Collection[Location] = (), **others: str) -> None:
    """Replicas at a place that die one after the other, before they are ready; `others` stay."""
    for number in range(times):
        deaths.observe(replicas(**{f"x{number}": where}, **others), (), avoided)
    deaths.observe(replicas(**others), (), avoided)


def test_only_replicas_that_were_never_ready_count() -> None:
    a, b, c, d, e = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.2", 1), ("10.0.0.1", 4), ("10.0.0.1", 5)
    deaths = EarlyDeaths()

    def observe(found: dict[str, HostPid | None], ready: set[HostPid]) -> int:
        return deaths.observe({name: SeenReplica(process) for name, process in found.items()}, ready)

    assert observe({"a": a, "b": None}, ready={a}) == 0
    assert observe({"a": a, "b": b}, ready={a}) == 0
    assert observe({"c": c, "b": b}, ready={a}) == 0, "a was ready"
    assert observe({"d": d, "b": b}, ready={a}) == 1, (
        "c was never ready: the ready process with its id is on another host"
    )
    assert observe({"d": d, "e": None}, ready=set()) == 2
    assert observe({"d": d, "e": e}, ready={e}) == 0, "e is ready, so replacing helps"
    deaths.leaving = 1
    assert observe({"e": e}, ready={e}) == 0, "the fleet was scaled down"
    assert observe({}, ready=set()) == 0


def test_one_bad_device_is_avoided_and_the_run_goes_on() -> None:
    rooms = Rooms({"n": frozenset({"0", "1"})})
    deaths = EarlyDeaths()
    die(deaths, "n/0", PLACE_TRIES, a1="n/1")
    assert deaths.used_up(rooms) == [Location("n", "0")], "its neighbour still starts"
    assert not deaths.hopeless(rooms)
    die(deaths, "n/0", 2 * MOST_DEATHS, avoided=[Location("n", "0")], a1="n/1")
    assert not deaths.hopeless(rooms), "replicas that hold the place do not count"
    assert deaths.in_row == PLACE_TRIES
    assert deaths.used_up(rooms) == [], "it is avoided already"


def test_the_only_place_is_never_avoided() -> None:
    rooms = Rooms({"n": frozenset({"0"})})
    deaths = EarlyDeaths()
    for died in range(1, EARLY_DEATHS + 2):
        die(deaths, "n/0", 1)
        assert deaths.used_up(rooms) == []
        assert deaths.hopeless(rooms) == (died > EARLY_DEATHS)
    grows = Rooms(rooms.nodes, may_grow=True)
    assert deaths.used_up(grows) == [Location("n", "0")], "another pod may be added"
    assert not deaths.hopeless(grows)


def test_deaths_wherever_it_was_tried_end_the_run() -> None:
    two = Rooms({"n": frozenset({"0"}), "m": frozenset({"0"})})
    deaths = EarlyDeaths()
    die(deaths, "n/0", PLACE_TRIES)
    assert deaths.used_up(two) == [Location("n", "0")], "m has not been tried"
    avoided = [Location("n", "0")]
    die(deaths, "m/0", PLACE_TRIES, avoided)
    assert deaths.used_up(two) == [], "n is avoided, so m is the last one"
    assert deaths.hopeless(two)

    many = Rooms({name: frozenset({"0"}) for name in "abcdefgh"}, may_grow=True)
    deaths = EarlyDeaths()
    for node in "abc":
        die(deaths, f"{node}/0", 2)
    assert deaths.hopeless(many), "three nodes at once are not at fault"


def test_a_slow_start_elsewhere_is_waited_for_up_to_a_limit() -> None:
    rooms = Rooms({name: frozenset({"0"}) for name in "abcd"})
    deaths = EarlyDeaths()
    for node in "abc":
        die(deaths, f"{node}/0", 2, d1="d/0")
    assert not deaths.hopeless(rooms), "d still starts"
    die(deaths, "a/0", MOST_DEATHS, d1="d/0")
    assert deaths.hopeless(rooms)
    deaths.observe(replicas(d1="d/0"), [("d", 1)])
    assert not deaths.hopeless(rooms), "d works"


def test_a_place_that_is_no_longer_avoided_is_tried_again() -> None:
    rooms = Rooms({"n": frozenset({"0", "1"})})
    deaths = EarlyDeaths()
    die(deaths, "n/0", PLACE_TRIES, a1="n/1")
    die(deaths, "n/0", 1, [Location("n", "0")], a1="n/1")
    die(deaths, "n/0", PLACE_TRIES - 1, a1="n/1")
    assert deaths.used_up(rooms) == []
    die(deaths, "n/0", 1, a1="n/1")
    assert deaths.used_up(rooms) == [Location("n", "0")]


def test_a_lost_device_without_another_one_ends_the_run() -> None:
    lost = [Location("n", "GPU-a")]
    only = Rooms({"n": frozenset({"GPU-a"})})
    deaths = EarlyDeaths()
    deaths.observe(replicas(a1="n/GPU-a"), (), lost)
    assert deaths.hopeless(only), "its replica can only hold it"
    assert not deaths.hopeless(Rooms({"n": frozenset({"GPU-a", "GPU-b"})}))
    assert not deaths.hopeless(Rooms(may_grow=True)), "its pod is being replaced"
    deaths.observe(replicas(b1="n/GPU-b"), (), lost)
    assert not deaths.hopeless(only), "the new pod of this node has another device"


def test_room_that_others_use_is_no_reason_to_avoid_a_place() -> None:
    nodes = {"n": frozenset({"0", "1"})}
    for spare, used_up in ((1.0, True), (0.0, False)):
        rooms = Rooms(nodes, spare={"n": spare})
        deaths = EarlyDeaths()
        die(deaths, "n/0", PLACE_TRIES)
        deaths.observe(replicas(y1="n/0"), ())
        assert bool(deaths.used_up(rooms)) == used_up, spare
    die(deaths, "n/0", EARLY_DEATHS + 1 - PLACE_TRIES, y1="n/0")
    assert deaths.hopeless(rooms), "the other device is the learner's"

    there, here = Location("n", "0"), Location("n", "1")
    cases = {
        "a replica has the bad device, the other is spare": (Rooms(nodes, spare={"n": 1}), [there], True),
        "only the bad device is spare": (Rooms(nodes, spare={"n": 1}), [here], False),
        "no device is spare": (Rooms(nodes, spare={"n": 0}), [there], False),
        "a share of the other device is spare": (Rooms(nodes, 0.5, spare={"n": 1.5}), [there], True),
        "only a share of the bad device is spare": (Rooms(nodes, 0.5, spare={"n": 0.5}), [there], False),
        "a node of which nothing is known": (Rooms(nodes), [there], True),
        "pods may be added": (Rooms(nodes, may_grow=True, spare={"n": 0}), [there], True),
    }
    assert {name: rooms.free([there], own) for name, (rooms, own, _) in cases.items()} == {
        name: free for name, (_, _, free) in cases.items()
    }
    whole = {"n": frozenset({""}), "m": frozenset({""})}
    assert Rooms(whole, spare={"n": 1, "m": 1}).free([Location("n")], [])
    assert not Rooms(whole, spare={"n": 1, "m": 0}).free([Location("n")], [])


def test_a_recipe_that_fails_on_several_devices_is_no_device() -> None:
    rooms = Rooms({"n": frozenset("01234567")})
    deaths, avoided = EarlyDeaths(), list[Location]()
    died = 0
    while not deaths.hopeless(rooms):
        here = f"n/{len(avoided)}"
        die(deaths, here, 1, avoided, **{f"h{at}": f"n/{at}" for at in range(len(avoided))})
        avoided += deaths.used_up(rooms)
        died += 1
        assert died < MOST_DEATHS
    assert died == 2 * PLACE_TRIES + 1


def test_replicas_that_only_hold_end_the_run_in_time() -> None:
    now = [0.0]
    grows = Rooms({"n": frozenset({""})}, may_grow=True)
    bad = [Location("n")]

    def held(ready: Collection[HostPid] = (), **places: str | None) -> EarlyDeaths:
        deaths = EarlyDeaths(clock=lambda: now[0])
        deaths.observe(replicas(y1="m/"), ready, [])
        deaths.leaving = 1
        now[0] = 0.0
        for seconds in (0.0, STUCK_S, 1.0):
            now[0] += seconds
            deaths.observe(replicas(**places), (), bad)
        return deaths

    assert held(a1="n/", b1=None).hopeless(grows), "b has no place"
    assert not held(a1="n/", b1="m/").hopeless(grows), "b starts"
    assert not held(a1=None).hopeless(grows), "none holds"
    assert not held(ready=[("y", 1)], a1="n/", b1=None).hopeless(grows), "the fleet has worked"


def test_a_place_where_a_replica_works_is_not_avoided() -> None:
    rooms = Rooms({"n": frozenset({""}), "m": frozenset({""})})
    deaths = EarlyDeaths()
    deaths.observe(replicas(a1="n/"), [("a", 1)])
    die(deaths, "n/", MOST_DEATHS + 1, a1="n/")
    assert deaths.used_up(rooms) == []
    assert not deaths.hopeless(rooms)


def test_a_death_of_a_working_engine_is_no_fault_of_its_place() -> None:
    rooms = Rooms({"n": frozenset({"0"}), "m": frozenset({"0"})})
    for last, expected in ((PLACE_TRIES - 1, []), (PLACE_TRIES, [Location("n", "0")])):
        deaths = EarlyDeaths()
        die(deaths, "n/0", PLACE_TRIES - 1)
        for _ in range(PLACE_TRIES):
            deaths.observe(replicas(j1="n/0"), (), joining=[("j", 1)])
            deaths.observe({}, ())
        assert deaths.in_row == 2 * PLACE_TRIES - 1
        die(deaths, "n/0", last)
        assert deaths.used_up(rooms) == expected
    only = Rooms({"n": frozenset({"0"})})
    assert deaths.hopeless(only), "they count for the run"


def test_places_meet_where_they_share_a_device() -> None:
    cases = {
        (Location("n", "0"), Location("n", "0")): True,
        (Location("n", "0+1"), Location("n", "1")): True,
        (Location("n", "0"), Location("n", "1")): False,
        (Location("n", ""), Location("n", "1")): True,
        (Location("n", "0"), Location("m", "0")): False,
    }
    assert {pair: pair[0].meets(pair[1]) for pair in cases} == cases
    assert Rooms({"n": frozenset("0123")}, needed=2).left([Location("n", "0+1")])
    assert not Rooms({"n": frozenset("012")}, needed=2).left([Location("n", "0+1")])
    assert not Rooms({"n": frozenset({""})}).left([Location("n")])


def test_gpus_without_a_uuid_are_named_by_their_pod() -> None:
    from deploy.hosting.environment import GPU_LABEL, NODE_LABEL
    from deploy.hosting.nodes.places import place_at

    one, other = "1" * 56, "2" * 56
    pod = {NODE_LABEL: "n"}
    assert place_at(one, ["0"], pod) == Location("n", "111111111111.0")
    assert not place_at(one, ["0"], pod).meets(place_at(other, ["0"], pod)), "two pods of one machine"
    assert place_at(one, ["0"], pod | {f"{GPU_LABEL}0": "GPU-a"}) == Location("n", "GPU-a")
    assert place_at(one, ["0", "1"], {}) == Location(one, "0+1"), "without a pod the node is one of Ray"
    assert place_at(one, [], pod) == Location("n")


def test_room_is_counted_by_machine_and_grows_by_every_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deploy.hosting.environment import GPU_LABEL, NODE_LABEL
    from deploy.hosting.nodes import places

    def node(name: str, machine: str, **gpus: str) -> dict[str, object]:
        labels = {NODE_LABEL: machine} | {f"{GPU_LABEL}{number[1:]}": uuid for number, uuid in gpus.items()}
        return {"NodeID": name, "Labels": labels, "Resources": {"GPU": 2.0 if gpus else 1.0, "CPU": 8.0}}

    monkeypatch.setattr(
        places, "role_nodes", lambda role: [node("p", "n", g0="a", g1="b"), node("q", "n"), node("r", "m")]
    )
    available = {"p": {"CPU": 4.0, "GPU": 1.0}, "q": {"CPU": 1.0, "GPU": 1.0}}
    monkeypatch.setattr(places, "available_resources", lambda: available)
    monkeypatch.delenv(VARIABLE, raising=False)
    nodes = {"n": frozenset({"a", "b", "q.0"}), "m": frozenset({"r.0"})}
    assert places.rooms("rollout", 2.0, 1.0) == Rooms(nodes, 1.0, False, {"n": 1.0, "m": 1.0})
    whole = {"n": frozenset({""}), "m": frozenset({""})}
    assert places.rooms("verifier", 5.0, 0.0) == Rooms(whole, 1, False, {"n": 0, "m": 1})

    pods = {"pods": 1, "cpus": 8, "gpus": 1}
    for groups, grows in (([], False), ([pods, pods], False), ([pods, pods, pods], True)):
        limits = {**dict.fromkeys(("cpu", "verifier", "learner"), pods), "rollout": {**pods, "groups": groups}}
        (tmp_path / "bounds").write_text(json.dumps(limits))
        monkeypatch.setenv(VARIABLE, str(tmp_path / "bounds"))
        assert places.rooms("rollout", 1.0, 1.0).may_grow == grows, groups


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


@pytest.mark.parametrize(("trigger", "fails"), [("HEALTH_CHECK_FAILED", False), ("REPLICA_STARTUP_FAILED", True)])
def test_a_replica_that_died_does_not_end_a_deployment(trigger: str, fails: bool) -> None:
    """By Serve's own rules for a fleet whose replicas do not all run yet: both have the same status."""
    from ray.serve._private import common

    from deploy.hosting.fleet import _deployment_failed

    updating, started = common.DeploymentStatus.UPDATING, common.DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
    before = common.DeploymentStatusInfo("rollout", updating, started)
    found = before.handle_transition(common.DeploymentStatusInternalTrigger(trigger), "a reason")
    assert found.status is common.DeploymentStatus.DEPLOY_FAILED
    deployment = {"status": found.status, "status_trigger": found.status_trigger}
    assert _deployment_failed({"status": "DEPLOY_FAILED"}, deployment) is fails
    assert not _deployment_failed({"status": "RUNNING"}, {"status": common.DeploymentStatus.HEALTHY})


def test_an_application_may_fail_before_it_has_a_deployment() -> None:
    from deploy.hosting.fleet import _deployment_failed

    assert _deployment_failed({"status": "DEPLOY_FAILED"}, {})
