"""A hostile text changes no later verdict of any verifier in any lane, and is not correct by itself."""

import pytest

from services.contracts import Lane, Outcome
from tests.verifier.sandbox.attacks import ATTACKS, FILES, GYM, PROGRAM, as_answer, as_response, later_texts
from verifier.sandbox.pool import Sandbox

WAYS = {"an answer that a scorer evaluates": as_answer, "a response that a function runs": as_response}
TAKEN_OVER = "the process is taken over"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(2, 0.2, [GYM], files=FILES, program=PROGRAM) as started:
        yield started


async def differing(sandbox, lane, count):
    """The later texts whose verdicts are not what they were."""
    texts = later_texts(count)
    judging = sandbox.judge_all([(reward, candidate) for reward, candidate, _ in texts], lane=lane)
    placed = [finding async for findings in judging for finding in findings]
    assert len(placed) == count
    return [(texts[place], finding) for place, finding in placed if finding.outcome is not texts[place][2]]


def test_there_are_at_least_31_attacks():
    assert len(ATTACKS) >= 31


async def test_verdicts_without_an_attack(sandbox):
    for lane in Lane:
        assert await differing(sandbox, lane, 24) == []


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_changes_no_later_verdict(sandbox, name):
    """It comes in the lane of training; test_attacks_in_either_lane has the other one too."""
    for way in WAYS.values():
        found = await sandbox.judge(*way(ATTACKS[name]))
        assert found.outcome is not Outcome.CORRECT or name == TAKEN_OVER, found
    for lane in Lane:
        assert await differing(sandbox, lane, 12) == []


@pytest.mark.slow
@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_in_either_lane(sandbox, name, way, lane):
    await sandbox.judge(*WAYS[way](ATTACKS[name]), lane=lane)
    for each in Lane:
        assert await differing(sandbox, each, 300) == []


async def test_no_answer_that_runs_code_is_evaluated():
    """As the product is, a scorer does not get these answers: they are wrong, and said to be so for that reason."""
    with Sandbox(2, 10.0, [GYM]) as sandbox:
        judging = sandbox.judge_all([as_answer(code) for code in ATTACKS.values()])
        placed = [finding async for findings in judging for _, finding in findings]
    assert len(placed) == len(ATTACKS)
    assert {found.outcome for found in placed} == {Outcome.WRONG}
    assert {found.reason for found in placed} == {"not a plain answer of string_insertion: not evaluated"}
