"""What the window since the last batch looked like; rewards, advantages and masks are the conformance suite's."""

import pytest

from services.contracts import Outcome
from services.sampler.batching import Window
from tests.services.judged import group_of, recipe

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


@pytest.mark.conformance(formula="accuracy of all that was judged, before filtering", setting="dynamic_sampling")
def test_window_measures_the_policy_before_filtering():
    window = Window(recipe(punishment=False))
    window.judged(group_of((C, 4, False, 3), (W, 16, True, 2), (W, 12, False, 3), (U, 4, False, 3)), "kept")
    window.judged(group_of((W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3)), "filtered")
    found = window.metrics()
    assert found["accuracy"] == pytest.approx(1 / 7)
    assert found["reward"] == pytest.approx((1 - 6) / 7)
    assert found["response_length"] == pytest.approx((4 + 16 + 12 + 4 + 32) / 8)
    assert found["truncated_share"] == pytest.approx(1 / 8)
    assert (found["groups_kept"], found["groups_filtered"], found["unknown_verdicts"]) == (1, 1, 1)
    assert (found["groups_with_0_of_4_correct"], found["groups_with_1_of_4_correct"]) == (1, 1)
    assert found["tokens_per_second"] == pytest.approx(68 / 16)


def test_window_in_which_nothing_was_judged_has_no_means():
    window = Window(recipe(punishment=False))
    found = window.metrics()
    assert found["groups_kept"] == 0.0
    assert not {"accuracy", "reward", "response_length", "truncated_share", "tokens_per_second"} & set(found)
