"""What a combination makes of the findings of its parts: outcome, score, reason, answer, fault, scores by part."""

from itertools import product

import pytest

from services.contracts import Outcome, SandboxFault
from services.settings.rewards.reward import RewardNames, parse_reward
from verifier.combination import PART_CHARACTERS, combined
from verifier.sandbox.finding import Finding, no_judgement

FINDINGS = {
    "c": Finding(Outcome.CORRECT, 1.0, "equal", "7"),
    "p": Finding(Outcome.CORRECT, 0.75, "nearly", "8"),
    "w": Finding(Outcome.WRONG, 0.0, "differs"),
    "h": Finding(Outcome.WRONG, 0.5, "half of it", "9"),
    "u": no_judgement("no judgement within 10 s", SandboxFault.TIMEOUT),
    "d": no_judgement("it died", SandboxFault.DIED),
}
"""By letter: correct, partly correct, wrong, half, unknown, died."""


def found(document, letters):
    """The finding of a reward from those of its single rewards, given by their letters."""
    return combined(parse_reward(document), [FINDINGS[letter] for letter in letters])


def of(kind, letters, weights=()):
    """The outcome and the score of a combination with as many parts as there are letters."""
    parts = [{"verifier": "math", "name": f"r{number}"} for number in range(len(letters))]
    for part, weight in zip(parts, weights, strict=False):
        part["weight"] = weight
    result = found({kind: parts}, letters)
    return result.outcome.value, result.score


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("c", ("correct", 1.0)),
        ("cp", ("correct", 0.75)),
        ("cw", ("wrong", 0.0)),
        ("hw", ("wrong", 0.0)),
        ("hc", ("wrong", 0.5)),
        ("cu", ("unknown", 0.0)),
        ("uu", ("unknown", 0.0)),
        ("uw", ("wrong", 0.0)),
        ("hu", ("wrong", 0.5)),
        ("uchp", ("wrong", 0.5)),
    ],
)
def test_all_is_as_good_as_its_worst_part(letters, expected):
    assert of("all", letters) == expected


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("w", ("wrong", 0.0)),
        ("wh", ("wrong", 0.5)),
        ("wc", ("correct", 1.0)),
        ("ph", ("correct", 0.75)),
        ("wu", ("unknown", 0.0)),
        ("uu", ("unknown", 0.0)),
        ("uc", ("correct", 1.0)),
        ("puw", ("correct", 0.75)),
    ],
)
def test_any_is_as_good_as_its_best_part(letters, expected):
    assert of("any", letters) == expected


@pytest.mark.parametrize(
    ("letters", "weights", "expected"),
    [
        ("c", (5.0,), ("correct", 1.0)),
        ("cw", (), ("correct", 0.5)),
        ("cw", (3.0, 1.0), ("correct", 0.75)),
        ("wc", (3.0, 1.0), ("wrong", 0.25)),
        ("hc", (1.0, 1.0), ("wrong", 0.75)),
        ("hpw", (1.0, 2.0, 1.0), ("wrong", 0.5)),
        ("cu", (1.0, 1e-6), ("unknown", 0.0)),
        ("uw", (1.0, 1.0), ("unknown", 0.0)),
    ],
)
def test_weighted_is_the_mean_and_the_first_part_decides(letters, weights, expected):
    outcome, score = of("weighted", letters, weights)
    assert (outcome, score) == (expected[0], pytest.approx(expected[1]))


def test_a_weighted_mean_of_full_scores_is_one():
    """Ten weights of 0.1 do not add up to 1 in binary; a score above 1 would be no verdict."""
    assert of("weighted", "c" * 10, [0.1] * 10) == ("correct", 1.0)
    assert of("weighted", "c" * 3, [1e6, 1e-6, 0.3]) == ("correct", 1.0)


@pytest.mark.parametrize("kind", ["all", "any", "weighted"])
def test_a_fault_is_there_iff_the_outcome_is_unknown(kind):
    for letters in product("cwhu", repeat=3):
        outcome, score = of(kind, letters)
        result = found({kind: [{"verifier": "math", "name": name} for name in "xyz"]}, letters)
        assert (result.fault is None) == (outcome != "unknown"), letters
        assert 0.0 <= score <= 1.0
        assert set(result.rewards) == {name for name, letter in zip("xyz", letters, strict=True) if letter != "u"}


def test_an_unknown_outcome_has_the_first_fault_and_no_answer():
    result = found({"all": ["math", "answer-line", "pattern"]}, "cdu")
    assert (result.outcome, result.score, result.fault) == (Outcome.UNKNOWN, 0.0, SandboxFault.DIED)
    assert result.answer == ""
    assert result.rewards == {"math": 1.0}


def test_a_response_that_is_missing_leaves_an_error():
    """A damaged payload is unknown without a fault of the sandbox."""
    missing = Finding(Outcome.UNKNOWN, 0.0, "the payload is gone")
    assert combined(parse_reward({"all": ["math", "pattern"]}), [missing, missing]).fault is SandboxFault.ERROR


def test_the_answer_is_that_of_the_first_part_that_has_one():
    assert found({"any": ["pattern", "math", "answer-line"]}, "whc").answer == "9"
    assert found({"any": ["pattern", "math"]}, "ww").answer == ""


def test_the_reason_quotes_each_part_by_name():
    document = {"weighted": [{"name": "right", "verifier": "math"}, {"name": "form", "verifier": "pattern"}]}
    assert found(document, "ch").reason == "right correct (1): equal; form wrong (0.5): half of it"
    long = Finding(Outcome.WRONG, 0.0, "x" * (PART_CHARACTERS + 1))
    reason = combined(parse_reward({"all": ["math"]}), [long]).reason
    assert reason == f"math wrong (0): {'x' * PART_CHARACTERS}..."


def test_a_single_reward_keeps_its_finding():
    assert found("math", "h") is FINDINGS["h"]


def test_inner_combinations_take_their_findings_in_order():
    document = {"all": [{"any": ["math", "pattern"]}, "answer-line", {"all": ["math", {"any": ["pattern", "math"]}]}]}
    assert [single.kind for single in parse_reward(document).singles] == [
        *("math", "pattern", "answer-line", "math", "pattern", "math")
    ]
    result = found(document, "wppcuc")
    assert (result.outcome, result.score) == (Outcome.CORRECT, 0.75)
    assert result.rewards == {"any": 0.75, "answer-line": 0.75, "all": 1.0}, "only the outermost parts have metrics"
    assert found(document, "wwpccc").outcome is Outcome.WRONG
    assert found(document, "wupccc").outcome is Outcome.UNKNOWN
    assert found(document, "wuwccc").outcome is Outcome.WRONG, "a wrong part decides"


def test_equal_parts_and_named_rewards_have_names_of_their_own():
    names = RewardNames({"mine": {"any": ["math", "answer-line"]}})
    reward = names.resolved(parse_reward({"all": ["math", "math", "mine"]}))
    result = combined(reward, [FINDINGS[letter] for letter in "cphw"])
    assert result.rewards == {"math": 1.0, "math-2": 0.75, "mine": 0.5}
    assert (result.outcome, result.score) == (Outcome.WRONG, 0.5)
