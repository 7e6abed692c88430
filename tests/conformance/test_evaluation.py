"""avg@k, pass@k, maj@k and their standard errors against numbers computed by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from services.sampler.evaluation.evaluator import sampling_of
from services.sampler.evaluation.scores import Response, average, majority, over_questions, pass_at, passes, sizes
from services.settings import parse_recipe
from tests.harness.small_run import recipe_document

PASS = "pass@k = 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374 Eq. 1)"
MAJORITY = "maj@k: whether the most frequent answer is correct"
MEAN = "avg@k: mean over questions of the share of correct responses; error s / sqrt(n)"
SAMPLES = "evaluation.samples"
RIGHT, WRONG, UNKNOWN = Response(True, "a"), Response(False, "b"), Response(None, "a")


@pytest.mark.conformance(formula=MEAN, setting=SAMPLES)
def test_average_over_known_verdicts_and_its_error() -> None:
    assert average([RIGHT, RIGHT, WRONG, UNKNOWN]) == pytest.approx(2 / 3)
    assert average([UNKNOWN]) is None
    # Values 2/3 and 0: mean 1/3; s^2 = ((1/3)^2 + (1/3)^2) / (2 - 1) = 2/9; s / sqrt(2) = 1/3.
    two = over_questions([2 / 3, 0.0])
    assert two is not None
    assert (two.value, two.standard_error) == pytest.approx((1 / 3, 1 / 3))
    # 0, 1/2, 1 and a question without a known verdict: mean 1/2; s = 1/2; s / sqrt(3).
    three = over_questions([0.0, 0.5, None, 1.0])
    assert three is not None
    assert (three.value, three.standard_error) == pytest.approx((0.5, 0.28867513))
    assert over_questions([None]) is None
    single = over_questions([0.25])
    assert single is not None
    assert (single.value, single.standard_error) == (0.25, 0.0)


@pytest.mark.conformance(formula=PASS, setting=SAMPLES)
@pytest.mark.parametrize(
    ("drawn", "correct", "wanted", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - 3/6; the biased 1 - (1 - c/n)^k would be 7/16
        (4, 1, 4, 1.0),
        (4, 2, 2, 5 / 6),  # 1 - 1/6
        (5, 2, 3, 9 / 10),  # 1 - 1/10
        (5, 0, 3, 0.0),
        (3, 3, 1, 1.0),
        (32, 1, 16, 1 / 2),
        (32, 2, 16, 47 / 62),  # 1 - (16 x 15) / (32 x 31)
    ],
)
def test_pass_at_k(drawn: int, correct: int, wanted: int, expected: float) -> None:
    assert pass_at(drawn, correct, wanted) == pytest.approx(expected, abs=1e-12)


@pytest.mark.conformance(formula=PASS, setting=SAMPLES)
def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    for drawn in range(1, 7):
        for correct in range(drawn + 1):
            for wanted in range(1, drawn + 1):
                subsets = list(combinations([True] * correct + [False] * (drawn - correct), wanted))
                expected = sum(map(any, subsets)) / len(subsets)
                assert pass_at(drawn, correct, wanted) == pytest.approx(expected), (drawn, correct, wanted)


@pytest.mark.conformance(formula=PASS, setting=SAMPLES)
def test_pass_at_k_of_questions_and_its_valid_arguments() -> None:
    assert sizes(32) == (1, 2, 4, 8, 16, 32)
    assert sizes(6) == (1, 2, 4, 6)
    assert sizes(1) == (1,)
    assert passes([RIGHT, WRONG, WRONG, WRONG], 2) == pytest.approx(0.5)
    # Two of four verdicts are unknown: pass@4 follows from the two known ones, and pass@1 is their mean.
    assert passes([RIGHT, WRONG, UNKNOWN, UNKNOWN], 4) == 1.0
    assert passes([RIGHT, WRONG, UNKNOWN, UNKNOWN], 1) == pytest.approx(0.5)
    assert passes([WRONG, UNKNOWN], 2) == 0.0
    assert passes([UNKNOWN, UNKNOWN], 2) is None
    for drawn, correct, wanted in ((4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)):
        with pytest.raises(ValueError, match=rf"correct = {correct}, wanted = {wanted} of drawn = {drawn}"):
            pass_at(drawn, correct, wanted)


@pytest.mark.conformance(formula=MAJORITY, setting=SAMPLES)
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("a+ a+ b-", 1.0),
        ("a+ b- b-", 0.0),
        ("a+ b-", 1 / 2),  # a tie: each answer wins with probability 1/2
        ("a+ a+ b- b- c- c-", 1 / 3),
        ("a+ a+ b- b- c-", 1 / 2),  # c is not part of the tie
        ("- - - a+", 1.0),  # responses without an answer do not vote
        ("- -", 0.0),  # no response votes
        ("a+ a? a? b- b-", 0.0),  # unknown verdicts do not vote
        ("a+ a- a- b-", 1 / 3),  # a verifier that contradicts itself
        ("a? b?", None),
    ],
)
def test_majority(answers: str, expected: float | None) -> None:
    verdicts = {"+": True, "-": False, "?": None}
    responses = [Response(verdicts[answer[-1]], answer[:-1]) for answer in answers.split()]
    found = majority(responses)
    assert found is None if expected is None else math.isclose(found or 0.0, expected)


@pytest.mark.conformance(formula="T = 1.0, top-p 0.7 (DAPO 4.1)", setting="evaluation.temperature, evaluation.top_p")
def test_evaluation_has_its_own_sampling_settings() -> None:
    recipe = parse_recipe(
        recipe_document("/m", rollout={"temperature": 0.8, "top_p": 0.9, "top_k": 9, "max_new_tokens": 16})
    )
    drawn = sampling_of(recipe)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_new_tokens) == (1.0, 0.7, None, 16)
    changed = parse_recipe(recipe_document("/m", evaluation={"temperature": 0.5, "top_p": 1.0, "max_new_tokens": 64}))
    drawn = sampling_of(changed)
    assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens) == (0.5, 1.0, 64)
    assert changed.rollout.max_new_tokens == 16
