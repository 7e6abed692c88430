"""How a kept group becomes part of a batch: rewards, advantages, masks, staleness, each with its switch."""

import pytest

from services.contracts import Outcome, Prompt, SampleFacts, Sampling, Task, Verdict
from services.sampler.batching import Window, batch_group
from services.sampler.ledger import Group
from services.settings import parse_recipe
from tests.conftest import recipe_document

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN


def group_of(*samples):
    """A group from (outcome, response tokens, truncated, oldest version)."""
    prompt = Prompt(id="p", messages=(), verifier="pattern", reference={})
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=16)
    group = Group(Task(group="g", prompt=prompt, samples=len(samples), sampling=sampling))
    for index, (outcome, tokens, truncated, version) in enumerate(samples):
        facts = SampleFacts(
            payload=f"g:{index}", prompt_tokens=5, response_tokens=tokens, truncated=truncated, mean_logprob=-1.0,
            oldest_version=version, newest_version=version, started_at=10.0, finished_at=10.0 + tokens,
        )  # fmt: skip
        group.verdicts[index] = Verdict(group="g", index=index, outcome=outcome, score=0.0, facts=facts)
    return group


def recipe(**overlong):
    return parse_recipe(recipe_document("/m", algorithm={"overlong": {"cache": 8, **overlong}}))


GROUP = group_of((C, 4, False, 3), (W, 16, True, 2), (W, 12, False, 3), (U, 4, False, 3))


def test_punishment_filtering_and_unknown_each_do_their_own():
    made = batch_group(recipe(punishment=True, filtering=False), "g", GROUP, version=3)
    assert [one.reward for one in made.samples] == [1.0, -2.0, -1.5, 0.0]
    assert [one.masked for one in made.samples] == [False, False, False, True]
    assert [one.staleness for one in made.samples] == [0, 1, 0, 0]
    assert [one.tokens for one in made.samples] == [4, 16, 12, 4], "response tokens, as the reductions count them"
    # known rewards 1, -2, -1.5: mean -5/6; deviations 11/6, -7/6, -4/6; variance (121 + 49 + 16) / 36 / 2 = 31/12
    assert [one.advantage for one in made.samples] == pytest.approx(
        [11 / 6 / 1.607276, -7 / 6 / 1.607276, -4 / 6 / 1.607276, 0.0], rel=1e-6
    )


def test_filtered_truncation_leaves_the_loss_but_not_the_group():
    made = batch_group(recipe(punishment=False, filtering=True), "g", GROUP, version=3)
    assert [one.reward for one in made.samples] == [1.0, -1.0, -1.0, 0.0]
    assert [one.masked for one in made.samples] == [False, True, False, True]
    # known rewards 1, -1, -1: mean -1/3; the masked one counts: variance (16 + 4 + 4) / 9 / 2 = 4/3
    assert made.samples[0].advantage == pytest.approx(4 / 3 / 1.1547005, rel=1e-5)


def test_window_measures_the_policy_before_filtering():
    window = Window(recipe(punishment=False))
    window.judged(GROUP, "kept")
    window.judged(group_of((W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3)), "filtered")
    found = window.metrics()
    assert found["accuracy"] == pytest.approx(1 / 7)
    assert found["reward"] == pytest.approx((1 - 6) / 7)
    assert found["response_length"] == pytest.approx((4 + 16 + 12 + 4 + 32) / 8)
    assert found["truncated_share"] == pytest.approx(1 / 8)
    assert (found["groups_kept"], found["groups_filtered"], found["unknown_verdicts"]) == (1, 1, 1)
    assert (found["groups_with_0_of_4_correct"], found["groups_with_1_of_4_correct"]) == (1, 1)
    assert found["tokens_per_second"] == pytest.approx(68 / 16)
