"""The reward of a response, the masking of truncated responses, and the filtering of groups."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts import Outcome
from services.sampler.advantage.filtering import FilterRule, decide
from services.sampler.advantage.rewards import PUNISHMENTS, Ramp, reward
from services.sampler.queue.batching import batch_group
from tests.services.sampler.judged import group_of, recipe

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN
FORMULAS = {
    "paper": "0, then (L_max - L_cache - |y|) / L_cache, then -1 (DAPO Eq. 13)",
    "published": "max(-f, min(-(|y| - L_exp) / L_cache x f, 0)) (code)",
}


def conformance(name: str) -> pytest.MarkDecorator:
    return pytest.mark.conformance(formula=FORMULAS[name], setting=f"overlong.shape = {name}")


SHAPED = [pytest.param(name, marks=conformance(name)) for name in PUNISHMENTS]


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
        (30000, -1.0),
    ],
)
def test_the_ramp_at_its_corners(name: str, tokens: int, expected: float) -> None:
    """L_max 20480, L_cache 4096: the two shapes agree where the factor is 1."""
    assert PUNISHMENTS[name](tokens, Ramp(20480, 4096, 1.0)) == pytest.approx(expected, abs=1e-12)


@conformance("published")
@pytest.mark.parametrize(("tokens", "expected"), [(16384, 0.0), (18432, -0.125), (20480, -0.25), (20481, -0.25)])
def test_the_published_shape_scales_with_its_factor(tokens: int, expected: float) -> None:
    assert PUNISHMENTS["published"](tokens, Ramp(20480, 4096, 0.25)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.conformance(formula="R = +1 or -1 (DAPO Eq. 7) + soft punishment", setting="overlong.punishment")
@pytest.mark.parametrize(
    ("outcome", "tokens", "punished", "expected"),
    [
        (C, 10, True, 1.0),
        (W, 10, True, -1.0),
        (W, 24, True, -2.0),
        (C, 20, True, 0.5),
        (C, 20, False, 1.0),
        (U, 20, True, None),
        (U, 20, False, None),
    ],
)
def test_reward(outcome: Outcome, tokens: int, punished: bool, expected: float | None) -> None:
    punishment = ("paper", Ramp(24, 8, 1.0)) if punished else None
    assert reward("verdict", outcome, 0.5, tokens, punishment) == expected, "whatever the score"


SCORE = pytest.mark.conformance(formula="R = 2 s - 1: 0 and 1 are the paper's -1 and +1", setting="reward = score")


@SCORE
@pytest.mark.parametrize(
    ("outcome", "score", "tokens", "punished", "expected"),
    [
        (W, 0.0, 10, False, -1.0),
        (W, 0.3, 10, False, -0.4),  # not -1
        (W, 0.5, 10, False, 0.0),
        (C, 0.75, 10, False, 0.5),
        (C, 1.0, 10, False, 1.0),
        (C, 1.0, 20, True, 0.5),
        (W, 0.0, 24, True, -2.0),
        (W, 0.3, 20, True, -0.9),
        (U, 1.0, 10, False, None),
        (U, 0.0, 24, True, None),
    ],
)
def test_reward_by_score(outcome: Outcome, score: float, tokens: int, punished: bool, expected: float | None) -> None:
    punishment = ("paper", Ramp(24, 8, 1.0)) if punished else None
    assert reward("score", outcome, score, tokens, punishment) == (
        None if expected is None else pytest.approx(expected)
    )


# Correct in 4 tokens; wrong and truncated at 16; wrong in 12; unknown.
GROUP = group_of((C, 4, False, 3), (W, 16, True, 2), (W, 12, False, 3), (U, 4, False, 3))


@pytest.mark.conformance(formula="filtering and punishment are independent (DAPO 3.4)", setting="overlong.*")
@pytest.mark.parametrize(
    ("overlong", "rewards", "masked"),
    [
        ({"punishment": False, "filtering": False}, [1.0, -1.0, -1.0, 0.0], [False, False, False, True]),
        ({"punishment": True, "filtering": False}, [1.0, -2.0, -1.5, 0.0], [False, False, False, True]),
        ({"punishment": False, "filtering": True}, [1.0, -1.0, -1.0, 0.0], [False, True, False, True]),
        ({"punishment": True, "filtering": True}, [1.0, -2.0, -1.5, 0.0], [False, True, False, True]),
        ({"shape": "published", "factor": 0.5}, [1.0, -1.5, -1.25, 0.0], [False, False, False, True]),
    ],
)
def test_filtering_and_punishment_are_independent(
    overlong: dict[str, Any], rewards: list[float], masked: list[bool]
) -> None:
    made = batch_group(recipe(**overlong), "g", GROUP, 4, {2: 2, 3: 3})
    assert [sample.reward for sample in made.samples] == rewards
    assert [sample.masked for sample in made.samples] == masked
    assert [sample.staleness for sample in made.samples] == [0, 1, 0, 0]
    assert [sample.tokens for sample in made.samples] == [4, 16, 12, 4], "response tokens, as the reductions count them"


@SCORE
@pytest.mark.parametrize("overlong", [{"punishment": False}, {"punishment": True, "filtering": True}])
def test_scores_of_0_and_1_train_like_verdicts(overlong: dict[str, Any]) -> None:
    made = [batch_group(recipe(mode, **overlong), "g", GROUP, 4, {2: 2, 3: 3}) for mode in ("verdict", "score")]
    assert made[0] == made[1]
    assert any(sample.advantage for sample in made[0].samples)


@SCORE
def test_a_batch_has_the_rewards_and_advantages_of_scores() -> None:
    """An unknown verdict is masked, and is in no mean or std, whatever its score."""
    samples = ((W, 4, False, 3), (C, 4, False, 3), (W, 4, False, 3), (U, 4, False, 3))
    group = group_of(*samples, scores=(0.3, 0.9, 0.3, 1.0))
    made = batch_group(recipe("score", punishment=False), "g", group, 4, {3: 3}).samples
    assert [sample.reward for sample in made] == pytest.approx([-0.4, 0.8, -0.4, 0.0])
    # rewards -0.4, 0.8, -0.4: mean 0; variance (0.16 + 0.64 + 0.16) / 2 = 0.48
    deviation = 0.48**0.5
    expected = [-0.4 / deviation, 0.8 / deviation, -0.4 / deviation, 0.0]
    assert [sample.advantage for sample in made] == pytest.approx(expected, rel=1e-5)
    assert [sample.masked for sample in made] == [False, False, False, True]
    assert [sample.correct for sample in made] == [False, True, False, False]


@pytest.mark.conformance(formula="a masked response stays in its group's mean and std", setting="overlong.filtering")
@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        # rewards 1, -1, -1: mean -1/3; deviations 4/3, -2/3 x 2; variance 24 / 9 / 2 = 4/3
        ({"punishment": False, "filtering": True}, [4 / 3 / 1.1547015, -2 / 3 / 1.1547015, -2 / 3 / 1.1547015, 0.0]),
        # rewards 1, -2, -1.5: mean -5/6; deviations 11/6, -7/6, -4/6; variance 186 / 36 / 2 = 31/12
        ({"punishment": True, "filtering": True}, [11 / 6 / 1.607276, -7 / 6 / 1.607276, -4 / 6 / 1.607276, 0.0]),
    ],
)
def test_a_masked_response_stays_in_its_groups_statistics(overlong: dict[str, Any], expected: list[float]) -> None:
    made = batch_group(recipe(**overlong), "g", GROUP, 4, {2: 2, 3: 3})
    assert [sample.advantage for sample in made.samples] == pytest.approx(expected, rel=1e-6)


@pytest.mark.conformance(formula="0 < correct < G (DAPO Eq. 11)", setting="dynamic_sampling")
@pytest.mark.parametrize(
    ("outcomes", "min_known", "enabled", "expected"),
    [
        ([C, W, W, W], 4, True, "kept"),
        ([C, C, C, W], 4, True, "kept"),
        ([C, C, C, C], 4, True, "filtered"),
        ([W, W, W, W], 4, True, "filtered"),
        ([W, W, W, W], 4, False, "kept"),
        ([C, C, C, C], 4, False, "kept"),
        ([C, W, W, U], 4, True, "dead"),
        ([C, W, W, U], 4, False, "dead"),
        ([C, W, W, U], 3, True, "kept"),
        ([C, C, C, U], 3, True, "filtered"),
        ([U, U, U, U], 1, False, "dead"),
    ],
)
def test_dynamic_sampling_depends_on_accuracy_alone(
    outcomes: list[Outcome], min_known: int, enabled: bool, expected: str
) -> None:
    scores = [0.0] * len(outcomes)
    assert decide(outcomes, min_known, enabled, scores, FilterRule("accuracy", 0.05)) == expected
    assert decide(outcomes, min_known, enabled) == expected, "the paper's rule is the default"


@pytest.mark.conformance(
    formula="highest - lowest known score >= min_spread", setting="dynamic_sampling.filter = spread"
)
@pytest.mark.parametrize(
    ("outcomes", "scores", "min_known", "expected"),
    [
        ([W, W, W, W], [0.2, 0.2, 0.4, 0.2], 4, "kept"),  # no response is correct
        ([C, C, C, C], [0.9, 1.0, 1.0, 1.0], 4, "kept"),
        ([W, W, W, W], [0.2, 0.2, 0.2, 0.29], 4, "filtered"),
        ([C, W, C, W], [0.5, 0.45, 0.5, 0.45], 4, "filtered"),  # mixed verdicts, but nearly equal rewards
        ([W, W, W, W], [0.3, 0.4, 0.3, 0.3], 4, "kept"),  # exactly min_spread, whatever the rounding
        ([W, W, W, W], [0.8, 0.7, 0.7, 0.7], 4, "kept"),
        ([C, W, W, W], [1.0, 0.0, 0.0, 0.0], 4, "kept"),
        ([C, C, C, C], [1.0, 1.0, 1.0, 1.0], 4, "filtered"),
        ([W, W, U, W], [0.2, 0.2, 1.0, 0.2], 3, "filtered"),  # the score of an unknown verdict means nothing
        ([W, W, U, W], [0.2, 0.2, 0.0, 0.2], 3, "filtered"),
        ([W, W, U, W], [0.2, 0.5, 0.0, 0.2], 3, "kept"),
        ([W, W, U, W], [0.2, 0.5, 0.0, 0.2], 4, "dead"),
        ([U, U, U, U], [0.0, 1.0, 0.0, 1.0], 1, "dead"),
    ],
)
def test_the_spread_filter_compares_known_scores(
    outcomes: list[Outcome], scores: list[float], min_known: int, expected: str
) -> None:
    rule = FilterRule("spread", 0.1)
    assert decide(outcomes, min_known, True, scores, rule) == expected
    assert decide(outcomes, min_known, False, scores, rule) == ("dead" if expected == "dead" else "kept")


@pytest.mark.conformance(formula="scores of 0 and 1: both filters agree", setting="dynamic_sampling.filter")
@pytest.mark.parametrize(
    "outcomes", [[C, W, W, W], [C, C, C, W], [C, C, C, C], [W, W, W, W], [C, C, W, U], [U, C, C, C]]
)
def test_both_filters_agree_on_scores_of_0_and_1(outcomes: list[Outcome]) -> None:
    scores = [float(outcome is C) for outcome in outcomes]
    for min_spread in (0.01, 1.0):
        assert decide(outcomes, 3, True, scores, FilterRule("spread", min_spread)) == decide(outcomes, 3, True)


@pytest.mark.conformance(formula="one score per outcome", setting="dynamic_sampling.filter = spread")
def test_the_spread_filter_needs_a_score_per_outcome() -> None:
    with pytest.raises(ValueError, match="zip"):
        decide([C, W], 2, True, [1.0], FilterRule("spread", 0.1))
