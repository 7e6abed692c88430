"""The campaign's results: faults of an interrupted run are injected again, and the table counts correctly."""

from __future__ import annotations

import json

from tests.chaos import results
from tests.chaos.campaign import FAULTS_WANTED, RARE, SHAPES, Campaign
from tests.chaos.episode import Played
from tests.chaos.faults import FAULTS
from tests.chaos.finding import Finding, Kind
from tests.chaos.injector import Outcome
from tests.chaos.oracle import Judgement


def played(run: str, *outcomes: Outcome, state: str = "succeeded", findings: tuple[Finding, ...] = ()) -> Played:
    return Played(run, state, "why", 100.0, Judgement(findings, {"steps": 3}), list(outcomes))


def struck(name: str, run: str, seconds: float | None, counted: bool = True) -> Outcome:
    return Outcome(name, run, counted, "", 1.0, seconds)


def test_the_table_counts_and_names_what_is_wrong(tmp_path):
    kills = [struck("kill verifier", "one", seconds) for seconds in (1.0, 2.0, 3.0, 40.0)]
    missed = struck("kill sampler", "one", None, counted=False)
    results.add(tmp_path, played("one", *kills, missed))
    lost = Finding(Kind.LOST, "g1", "gone")
    results.add(tmp_path, played("two", struck("kill Redis", "two", None), findings=(lost,)))
    results.add_broken(tmp_path, "three", "no stack\nat all")
    found = results.read(tmp_path)
    assert found.counted == {"kill verifier": 4, "kill Redis": 1}
    assert results.rows(found) == [
        ("kill verifier", "4", "4", "2.0", "40.0", "0", "0"),
        ("kill Redis", "1", "0", "nan", "nan", "1", "0"),
        ("all", "5", "4", "2.0", "40.0", "1", "0"),
    ]
    assert results.shortcomings(found, 6, 1) == [
        "5 faults counted: expected 6",
        "0 engines were killed: expected 1",
        "two: no recovery from 'kill Redis'",
        "two: lost: g1: gone",
        "three broken: no stack",
    ]
    assert "kill sampler" not in results.table(found)


def test_a_fault_that_never_counted_is_a_shortcoming(tmp_path):
    results.add(tmp_path, played("one", struck("kill Redis", "one", 1.0)))
    wrong = results.shortcomings(results.read(tmp_path), 1, 0, each=["kill Redis", "store away"])
    assert wrong == ["'store away' never counted"]


def test_a_complete_campaign_has_no_shortcomings(tmp_path):
    results.add(tmp_path, played("one", struck("kill engine core at work", "one", 9.0)))
    assert results.shortcomings(results.read(tmp_path), 1, 1) == []


def test_faults_of_a_run_that_was_not_judged_are_repeated(tmp_path):
    whole = played("one", struck("kill Redis", "one", 1.0))
    results.add(tmp_path, whole)
    with (tmp_path / results.FILE).open("a") as file:
        file.write(json.dumps(struck("kill Redis", "two", 1.0).as_json()) + "\n")
    assert results.read(tmp_path).counted == {"kill Redis": 1}


def test_an_interrupted_campaign_is_resumed(tmp_path):
    campaign = Campaign(tmp_path, seed=5, steps=10)
    before = campaign.left()
    names = campaign.deck(SHAPES[0], 0)
    assert names == Campaign(tmp_path, seed=5, steps=10).deck(SHAPES[0], 0), "the seed must determine the faults"
    assert names != campaign.deck(SHAPES[0], 1)
    assert all(FAULTS[name].needs in SHAPES[0].offers for name in names)
    results.add(tmp_path, played("one", *(struck(name, "one", 1.0) for name in names)))
    assert campaign.left().total() == before.total() - len(names)


def test_what_few_shapes_offer_comes_first(tmp_path):
    campaign = Campaign(tmp_path, seed=5, steps=10)
    for shape in SHAPES:
        rare = [name for name in campaign.deck(shape, 0) if FAULTS[name].needs in RARE]
        possible = sum(fault.times for fault in FAULTS.values() if fault.needs in RARE & shape.offers)
        assert len(rare) >= min(possible, 8), shape


def test_every_fault_is_open_to_some_shape():
    assert {fault.needs for fault in FAULTS.values()} <= {need for shape in SHAPES for need in shape.offers}


def test_a_campaign_may_be_restricted(tmp_path):
    campaign = Campaign(tmp_path, 5, 10, only=("kill rank", "store away"))
    assert {name.split()[0] for name in campaign.wanted} == {"kill", "store"}
    assert campaign.open_to(SHAPES[0]) == []
    found = results.Results()
    assert f"0 faults counted: expected {campaign.wanted.total()}" in campaign.shortcomings(found, 220, 20)


def test_the_campaign_has_enough_faults():
    """Enough faults, 20 of them engine kills, even if no disk can be filled."""
    assert sum(fault.times for fault in FAULTS.values() if fault.needs != "disk") >= FAULTS_WANTED
    assert sum(fault.times for fault in FAULTS.values() if fault.engine) >= 20
