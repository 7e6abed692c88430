"""Group-level maths against numbers worked out by hand."""

import pytest

from services.contracts import Outcome
from services.sampler.credit.advantages import ADVANTAGES, advantages
from services.sampler.credit.filtering import decide
from services.sampler.credit.shaping import reward, soft_overlong_punishment

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
def test_overlong_ramp_of_the_paper(tokens, expected):
    assert soft_overlong_punishment(tokens, longest=20480, cache=4096) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("outcome", "tokens", "cache", "expected"),
    [(C, 10, 8, 1.0), (W, 10, 8, -1.0), (W, 24, 8, -2.0), (C, 20, 8, 0.5), (C, 20, None, 1.0), (U, 20, 8, None)],
)
def test_reward(outcome, tokens, cache, expected):
    assert reward(outcome, tokens, longest=24, overlong_cache=cache) == expected


@pytest.mark.parametrize(
    ("outcomes", "min_known", "enabled", "expected"),
    [
        ([C, W, W, W], 4, True, "kept"),
        ([C, C, C, C], 4, True, "filtered"),
        ([W, W, W, W], 4, True, "filtered"),
        ([W, W, W, W], 4, False, "kept"),
        ([C, W, W, U], 4, True, "dead"),
        ([C, W, W, U], 3, True, "kept"),
        ([C, C, C, U], 3, True, "filtered"),
        ([U, U, U, U], 1, False, "dead"),
    ],
)
def test_dynamic_sampling_is_decided_on_accuracy(outcomes, min_known, enabled, expected):
    assert decide(outcomes, min_known, enabled) == expected


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # rewards 1, -1, -1, -1: mean -0.5; deviations 1.5, -0.5 x3; sum of squares 3
        ("group_std", [1.5 / 1.000001, -0.5 / 1.000001]),  # sqrt(3 / 3) = 1
        ("group_std_biased", [1.5 / 0.8660264, -0.5 / 0.8660264]),  # sqrt(3 / 4) = 0.8660254
        ("group_mean", [1.5, -0.5]),
    ],
)
def test_advantages_of_a_single_winner(estimator, expected):
    winner, *losers = advantages(estimator, [1.0, -1.0, -1.0, -1.0])
    assert winner == pytest.approx(expected[0], rel=1e-7)
    assert losers == pytest.approx([expected[1]] * 3, rel=1e-7)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
def test_unknown_rewards_leave_the_statistics(estimator):
    with_unknown = advantages(estimator, [1.0, None, -1.0])
    assert with_unknown[1] == 0.0
    assert [with_unknown[0], with_unknown[2]] == advantages(estimator, [1.0, -1.0])
    assert advantages(estimator, [None, None]) == [0.0, 0.0]
