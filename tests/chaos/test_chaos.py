"""A short run under a few faults: it succeeds, and the oracle finds nothing lost and nothing trained twice."""

from __future__ import annotations

import json
import os
import random

import pytest

from tests.chaos.episode import Episode, Played
from tests.chaos.ground import Ground
from tests.harness.stack import Stack
from tests.harness.workload import recipe, write_model, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "1"))
STEPS = 48
FAULTS = (
    "kill engine core at work",
    "kill verifier",
    "duplicated message",
    "kill sampler",
    "damaged payload",
    "kill learner rank with a batch",
    "kill gateway",
    "kill Redis",
)
"""The faults, two at a time; PENSTOCK_CHAOS_SEED chooses victims and messages."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("chaos")
    document = recipe(
        write_model(folder / "model"),
        write_questions(folder / "questions.jsonl"),
        steps=STEPS,
        replicas=2,
        ranks=1,
        staleness=1,
    )
    with Stack(folder / "runs") as stack:
        run = f"chaos-{random.Random(SEED).getrandbits(32):08x}"
        episode = Episode(stack, run, document, SEED, Ground(), say=print)
        return episode.play(FAULTS, at_once=2)


@pytest.mark.timeout(900)
def test_a_run_survives_several_faults(played: Played):
    results = "\n".join(json.dumps(outcome.as_json()) for outcome in played.outcomes)
    assert played.state == "succeeded", f"{played.reason}\n{results}"
    assert not played.judgement.findings, f"{played.judgement}\n{results}"
    assert (played.judgement.lost, played.judgement.duplicated) == (0, 0)


def test_every_fault_counted_and_the_run_recovered(played: Played):
    assert sorted(outcome.fault for outcome in played.outcomes if outcome.counted) == sorted(FAULTS)
    assert [outcome.fault for outcome in played.outcomes if not outcome.recovered] == []


def test_the_oracle_has_evidence_of_the_whole_run(played: Played):
    figures = played.judgement.figures
    assert figures["steps"] == STEPS
    assert figures["trained"] == 4 * STEPS
    assert figures["dispatched"] >= figures["trained"]
    assert figures["entries"] > 4 * figures["trained"]
