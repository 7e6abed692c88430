"""The closed forms of a screen's cost and selection agree with the rules that they describe."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.selection.closed_forms import (
    cost_over,
    kept_distribution,
    passes,
    samples_drawn,
    samples_per_kept,
    total_variation,
)
from services.contracts import Outcome
from services.sampler.advantage.filtering import KEPT, decide
from services.sampler.selection.posterior import mixed
from services.sampler.selection.screening import COMPLETE, screen

C, W = Outcome.CORRECT, Outcome.WRONG
RATES = st.floats(0.001, 0.999)


@pytest.mark.parametrize(("rate", "screened"), [(0.05, 2), (0.3, 4), (0.5, 4), (0.9, 8), (0.5, 16)])
def test_closed_forms_agree_with_the_rules(rate: float, screened: int) -> None:
    """20,000 groups of 16, decided by the rules themselves; within four standard errors."""
    rng, groups = random.Random(7), 20_000
    samples = kept = 0
    for _ in range(groups):
        outcomes = [C if rng.random() < rate else W for _ in range(16)]
        complete = screened == 16 or screen(outcomes[:screened], 16, 16) == COMPLETE
        samples += 16 if complete else screened
        kept += complete and decide(outcomes, 16, enabled=True) == KEPT
    chance = mixed(rate, screened)
    error = math.sqrt(chance * (1 - chance) / groups)
    assert kept / groups == pytest.approx(chance, abs=4 * error)
    assert samples / groups == pytest.approx(samples_drawn(rate, 16, screened), abs=4 * error * (16 - screened) + 1e-9)
    assert samples / kept == pytest.approx(samples_per_kept(rate, 16, screened), rel=6 * error / chance)


@given(rate=RATES, size=st.integers(2, 20), data=st.data())
def test_passes_sum_to_the_chance_of_a_mixed_screen(rate: float, size: int, data: st.DataObject) -> None:
    """The law of total probability over the binomial number of correct answers."""
    screened = data.draw(st.integers(1, size))
    total = math.fsum(
        math.comb(size, correct) * rate**correct * (1 - rate) ** (size - correct) * passes(correct, size, screened)
        for correct in range(size + 1)
    )
    assert total == pytest.approx(mixed(rate, screened), abs=1e-9)


def test_a_screen_misses_the_rare_answer_of_a_prompt() -> None:
    found = [passes(correct, 16, 4) for correct in range(17)]
    assert found[0] == found[16] == 0
    assert found[1] == pytest.approx(4 / 16)  # the one correct answer must be among the four
    assert found[1:9] == sorted(found[1:9])
    assert found == pytest.approx(found[::-1])
    assert all(passes(correct, 16, 2) > 0 for correct in range(1, 16))


def test_a_screen_trains_rare_successes_less_often() -> None:
    for screened in (2, 4, 8):
        assert mixed(1e-7, screened) / mixed(1e-7, 16) == pytest.approx(screened / 16, rel=1e-5)
        assert mixed(0.5, screened) / mixed(0.5, 16) == pytest.approx(1 - 2.0 ** (1 - screened), rel=1e-4)


@given(rate=RATES, size=st.integers(3, 64), data=st.data())
def test_no_screen_saves_samples_at_a_single_pass_rate(rate: float, size: int, data: st.DataObject) -> None:
    screened = data.draw(st.integers(2, size - 1))
    without = samples_per_kept(rate, size, size)
    assert without == pytest.approx(size / mixed(rate, size))
    assert samples_per_kept(rate, size, screened) >= without * (1 - 1e-9)


def test_samples_at_pass_rates_0_and_1() -> None:
    assert samples_per_kept(0.5, 16, 4) == pytest.approx(4 / 0.875 + 12)
    for rate in (0.0, 1.0):
        assert samples_drawn(rate, 16, 4) == 4
        assert samples_drawn(rate, 16, 16) == 16
        assert math.isinf(samples_per_kept(rate, 16, 4))


def test_a_screen_saves_samples_on_prompts_without_signal() -> None:
    rates, weights = (0.0, 0.5), (3.0, 1.0)
    # Three of four prompts give no group: 4 x 16 samples per group, or 3 x 4 plus those of the fourth prompt.
    assert cost_over(rates, weights, 16, 16) == pytest.approx(64 / mixed(0.5, 16))
    assert cost_over(rates, weights, 16, 4) == pytest.approx(12 / 0.875 + 4 / 0.875 + 12)
    assert cost_over((0.3,), (5.0,), 16, 4) == pytest.approx(samples_per_kept(0.3, 16, 4))


def test_a_screen_shifts_training_to_middle_pass_rates() -> None:
    rates, weights = (0.0, 0.02, 0.5, 0.98), (5.0, 1.0, 1.0, 1.0)
    full, screened = (kept_distribution(rates, weights, size) for size in (16, 4))
    assert math.fsum(full) == pytest.approx(1)
    assert full[0] == screened[0] == 0
    edge, middle = 1 - 0.98**16 - 0.02**16, 1 - 2 * 0.5**16
    assert full[1] == pytest.approx(edge / (2 * edge + middle))
    assert screened[1] < full[1]
    assert total_variation(full, screened) == pytest.approx(screened[2] - full[2])
    assert total_variation(full, full) == 0
    assert total_variation((1.0, 0.0), (0.0, 1.0)) == 1


def test_a_distribution_without_signal_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"rates: \[0.0, 1.0\] is not valid: expected one between 0 and 1"):
        kept_distribution((0.0, 1.0), (1.0, 1.0), 16)
