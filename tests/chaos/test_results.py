"""The campaign's results: faults of an interrupted run are injected again, and the table counts correctly."""

from __future__ import annotations

import json

from tests.chaos import results
from tests.chaos.campaign import SHAPES, Campaign
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
    assert all(FAULTS[name].needs != "proxy" for name in names)
    results.add(tmp_path, played("one", *(struck(name, "one", 1.0) for name in names)))
    assert campaign.left().total() == before.total() - len(names)


def test_the_campaign_has_enough_faults():
    """At least 200 faults, 20 of them engine kills, even if no disk can be filled."""
    assert sum(fault.times for fault in FAULTS.values() if fault.needs != "disk") >= 200
    assert sum(fault.times for fault in FAULTS.values() if fault.engine) >= 20
