"""Group-relative advantages by hand for every estimator of the table, and their invariances."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.advantage.advantages import ADVANTAGES, advantages

FORMULAS = {
    "group_std": "(R - mean) / (std + 1e-6), n - 1 (DAPO Eq. 9, code)",
    "group_std_biased": "(R - mean) / (std + 1e-6), n (DAPO Eq. 9)",
    "group_mean": "R - mean (Dr. GRPO)",
    "leave_one_out": "R_i - mean of the others (RLOO)",
}
ESTIMATED = [
    pytest.param(name, marks=pytest.mark.conformance(formula=FORMULAS[name], setting=f"advantage = {name}"))
    for name in FORMULAS
]
SINGLE_WINNER = {
    # rewards 1, -1, -1, -1: mean -0.5; deviations 1.5, -0.5 x 3; sum of squares 3
    "group_std": (1.5 / 1.000001, -0.5 / 1.000001),  # sqrt(3 / 3) = 1
    "group_std_biased": (1.5 / 0.8660264, -0.5 / 0.8660264),  # sqrt(3 / 4) = 0.8660254
    "group_mean": (1.5, -0.5),
    "leave_one_out": (2.0, -2 / 3),  # 1 - (-1); -1 - (1 - 1 - 1) / 3
}
UNEVEN = {
    # rewards 1, -2, -1.5, as after a punishment: mean -5/6; deviations 11/6, -7/6, -4/6
    "group_std": (11 / 6 / 1.607276, -7 / 6 / 1.607276, -4 / 6 / 1.607276),  # sqrt(186 / 36 / 2) = 1.607275
    "group_std_biased": (11 / 6 / 1.312336, -7 / 6 / 1.312336, -4 / 6 / 1.312336),  # sqrt(186 / 36 / 3) = 1.312335
    "group_mean": (11 / 6, -7 / 6, -4 / 6),
    "leave_one_out": (2.75, -1.75, -1.0),  # 1 + 1.75; -2 + 0.25; -1.5 + 0.5
}


@pytest.mark.conformance(formula="every estimator has tests", setting="algorithm.advantage")
def test_every_estimator_is_tested() -> None:
    assert set(ADVANTAGES) == {*FORMULAS, "gae"}


@pytest.mark.conformance(formula="R, from which the learner computes GAE (PPO)", setting="advantage = gae")
def test_the_learner_gets_rewards_for_gae() -> None:
    assert advantages("gae", [1.0, None, -1.5]) == [1.0, 0.0, -1.5]
    assert advantages("gae", [-1.0]) == [-1.0]


@pytest.mark.parametrize("name", ESTIMATED)
def test_a_single_winner(name: str) -> None:
    winner, *losers = advantages(name, [1.0, -1.0, -1.0, -1.0])
    assert winner == pytest.approx(SINGLE_WINNER[name][0], rel=1e-7)
    assert losers == pytest.approx([SINGLE_WINNER[name][1]] * 3, rel=1e-7)


@pytest.mark.parametrize("name", ESTIMATED)
def test_three_different_rewards(name: str) -> None:
    assert advantages(name, [1.0, -2.0, -1.5]) == pytest.approx(UNEVEN[name], rel=1e-6)


@pytest.mark.conformance(formula="std: n - 1 against n differ by sqrt(n / (n - 1))", setting="advantage = group_std*")
@pytest.mark.parametrize(("size", "factor"), [(2, 1.414214), (4, 1.154701), (16, 1.032796)])
def test_unbiased_against_biased(size: int, factor: float) -> None:
    rewards = [1.0] + [-1.0] * (size - 1)
    biased, unbiased = advantages("group_std_biased", rewards), advantages("group_std", rewards)
    assert biased[0] / unbiased[0] == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATED)
@pytest.mark.parametrize("rewards", [[1.0] * 4, [-1.0] * 16, [0.1, 0.1, 0.1], [-2.0], [None, 1.0], [None, None], []])
def test_a_degenerate_group_has_no_advantage(name: str, rewards: list[float | None]) -> None:
    """With equal rewards, one known reward or none, advantages are 0, without a division by zero."""
    assert advantages(name, rewards) == pytest.approx([0.0] * len(rewards), abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATED)
def test_unknown_rewards_do_not_enter_the_statistics(name: str) -> None:
    found = advantages(name, [1.0, None, -1.0, None])
    assert [found[1], found[3]] == [0.0, 0.0]
    expected = {
        "group_std": [0.707106, -0.707106],
        "group_std_biased": [1, -1],
        "group_mean": [1, -1],
        "leave_one_out": [2, -2],
    }
    assert [found[0], found[2]] == pytest.approx(expected[name], rel=2e-6)


REWARDS = st.lists(st.floats(-2, 1), min_size=2, max_size=16).filter(lambda rewards: max(rewards) - min(rewards) > 0.05)


@pytest.mark.parametrize("name", ESTIMATED)
@given(rewards=REWARDS, shift=st.floats(-10, 10))
def test_a_shift_of_all_rewards_changes_nothing(name: str, rewards: list[float], shift: float) -> None:
    assert advantages(name, [reward + shift for reward in rewards]) == pytest.approx(
        advantages(name, rewards), abs=1e-9
    )


@pytest.mark.parametrize("name", ESTIMATED)
@given(rewards=REWARDS, scale=st.floats(0.5, 8))
def test_the_effect_of_scaling_all_rewards(name: str, rewards: list[float], scale: float) -> None:
    """Estimators that divide by the std remove the scale, except for the 1e-6. The others keep it."""
    expected = [advantage * (1 if "std" in name else scale) for advantage in advantages(name, rewards)]
    assert advantages(name, [reward * scale for reward in rewards]) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATED)
@given(rewards=REWARDS, data=st.data())
def test_order_does_not_matter(name: str, rewards: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    found = advantages(name, rewards)
    assert advantages(name, [rewards[index] for index in order]) == pytest.approx([found[index] for index in order])


@pytest.mark.parametrize("name", ESTIMATED)
@given(rewards=REWARDS)
def test_the_advantages_of_a_group_sum_to_0(name: str, rewards: list[float]) -> None:
    assert math.fsum(advantages(name, rewards)) == pytest.approx(0.0, abs=1e-8)


@pytest.mark.conformance(formula="leave-one-out = n / (n - 1) x (R - mean)", setting="advantage = leave_one_out")
@given(rewards=REWARDS)
def test_leave_one_out_is_the_centred_reward_scaled(rewards: list[float]) -> None:
    factor = len(rewards) / (len(rewards) - 1)
    expected = [factor * advantage for advantage in advantages("group_mean", rewards)]
    assert advantages("leave_one_out", rewards) == pytest.approx(expected, abs=1e-9)
