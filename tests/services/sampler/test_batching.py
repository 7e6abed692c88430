"""The batch message, and the metrics window since the last batch.

The conformance suite tests rewards, advantages and masks.
"""

import pytest

from services.contracts import CommittedPolicy, Outcome, SamplerState
from services.sampler.queue.batching import SCREENED, Window, batch_group, make_batch
from services.sampler.selection.order import shuffled
from tests.services.sampler.judged import group_of, recipe

C, W, U = Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN
AT_3 = CommittedPolicy(version=3, step=3, version_steps='{"3": 3}')


@pytest.mark.conformance(formula="accuracy over all judged samples, before filtering", setting="dynamic_sampling")
def test_window_measures_the_policy_before_filtering():
    window = Window(recipe(punishment=False))
    window.judged(group_of((C, 4, False, 3), (W, 16, True, 2), (W, 12, False, 3), (U, 4, False, 3)), "kept")
    window.judged(group_of((W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3), (W, 8, False, 3)), "filtered")
    metrics = window.metrics()
    assert metrics["accuracy"] == pytest.approx(1 / 7)
    assert metrics["reward"] == pytest.approx((1 - 6) / 7)
    assert metrics["response_length"] == pytest.approx((4 + 16 + 12 + 4 + 32) / 8)
    assert metrics["truncated_share"] == pytest.approx(1 / 8)
    assert (metrics["groups_kept"], metrics["groups_filtered"], metrics["unknown_verdicts"]) == (1, 1, 1)
    assert (metrics["groups_with_0_of_4_correct"], metrics["groups_with_1_of_4_correct"]) == (1, 1)
    assert metrics["tokens_per_second"] == pytest.approx(68 / 16)


def test_window_measures_scores_and_named_rewards():
    """A part without a verdict has no score in that verdict; the part of an unknown verdict may have one."""
    window = Window(recipe("score", punishment=False))
    rewards = [{"math": 0.0, "has-a-box": 1.0}, {"math": 1.0, "has-a-box": 0.0}, {"has-a-box": 0.5}, {}]
    samples = ((W, 4, False, 3), (C, 4, False, 3), (U, 4, False, 3), (W, 4, False, 3))
    window.judged(group_of(*samples, scores=(0.3, 0.9, 1.0, 0.0), rewards=rewards), "kept")
    metrics = window.metrics()
    assert metrics["score"] == pytest.approx(0.4)
    assert metrics["reward"] == pytest.approx(-0.2), "2 s - 1"
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["reward_math"] == pytest.approx(0.5)
    assert metrics["reward_has_a_box"] == pytest.approx(0.5)
    assert [metrics[f"groups_with_{n}_of_4_correct"] for n in range(5)] == [0, 1, 0, 0, 0]


def test_rows_may_name_more_rewards_than_are_shown():
    window = Window(recipe(punishment=False))
    for number in range(100):
        window.judged(group_of((C, 4, False, 3), rewards=[{"common": 1.0, f"of-row-{number}": 0.5}]), "kept")
    named = [name for name in window.metrics() if name.startswith("reward_")]
    assert len(named) == 32
    assert "reward_common" in named


def test_an_empty_window_has_no_means():
    window = Window(recipe(punishment=False))
    metrics = window.metrics()
    assert metrics["groups_kept"] == 0.0
    assert not {"accuracy", "reward", "response_length", "truncated_share", "tokens_per_second", "score"} & set(metrics)


def test_a_screened_out_group_counts_outside_the_histogram():
    window = Window(recipe(punishment=False))
    window.judged(group_of((W, 8, False, 3), (W, 8, False, 3), rest=2), "filtered")
    window.judged(group_of((C, 4, False, 3), (C, 4, False, 3), (W, 4, False, 3), (W, 4, False, 3)), "kept")
    metrics = window.metrics()
    assert SCREENED == "screened out"
    assert (metrics["groups_screened_out"], metrics["groups_filtered"], metrics["groups_kept"]) == (1, 1, 1)
    assert [metrics[f"groups_with_{n}_of_4_correct"] for n in range(5)] == [0, 0, 1, 0, 0]
    assert window.histogram == "groups by correct answers of 4: 0 with 0, 0 with 1, 1 with 2, 0 with 3, 0 with 4"
    assert metrics["accuracy"] == pytest.approx(2 / 6), "its samples still measure the policy"
    assert metrics["response_tokens"] == 32


@pytest.mark.parametrize("filtering", [False, True])
def test_a_batch_reports_staleness_and_cost_of_its_groups(filtering):
    settings = recipe(punishment=False, filtering=filtering)
    window = Window(settings)
    kept = {
        "g1": group_of((C, 4, False, 3), (W, 16, True, 2), (W, 12, False, 4), (U, 4, False, 3)),
        "g0": group_of((C, 8, False, 5), (W, 8, False, 5), (W, 8, False, 5), (W, 8, False, 5)),
    }
    for group in kept.values():
        window.judged(group, "kept")
    window.judged(group_of((W, 10, False, 3), (W, 10, False, 3), (W, 10, False, 3), (W, 10, False, 3)), "filtered")
    state = SamplerState(cursor=3, next_group=3, scan=1, draws=2)
    policy = CommittedPolicy(version=4, step=3, version_steps='{"2": 2, "3": 3, "4": 3, "5": 4}')
    batch = make_batch(settings, 5, policy, kept, state, window.metrics(), last=True, snapshot="key")
    found = {group.group: group for group in batch.groups}
    assert {name: (group.prompt, group.staleness) for name, group in found.items()} == {"g1": ("p", 2), "g0": ("p", 0)}
    assert [sample.staleness for sample in found["g1"].samples] == [1, 2, 1, 1]
    assert [sample.replica for sample in found["g1"].samples] == [f"rollout-{index}" for index in range(4)]
    assert (batch.step, batch.version, batch.last, batch.snapshot, batch.sampler_state) == (5, 5, True, "key", state)
    metrics = batch.sampling_metrics
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (pytest.approx(5 / 8), 2.0)
    trained = 4 + 12 + (0 if filtering else 16) + 32
    assert metrics["rollout_tokens_per_trained_token"] == pytest.approx((36 + 32 + 40) / trained)


@pytest.mark.conformance(formula="groups are shuffled before they are cut into mini-batches", setting="seed")
def test_a_batch_holds_its_groups_in_shuffled_order():
    """Groups that were complete first, with short answers, are spread over the mini-batches."""
    settings = recipe(punishment=False, filtering=False)
    kept = {f"g{n}": group_of(*[(C, n, False, 3)] * 2, *[(W, n, False, 3)] * 2) for n in range(1, 33)}
    window = Window(settings)
    for group in kept.values():
        window.judged(group, "kept")
    state = SamplerState(cursor=0, next_group=0)
    batch = make_batch(settings, 4, AT_3, kept, state, window.metrics())
    assert [group.group for group in batch.groups] == shuffled(kept, settings.seed, 4)
    in_reverse = make_batch(settings, 4, AT_3, dict(reversed(kept.items())), state, window.metrics())
    assert in_reverse.groups == batch.groups
    assert all(sample.tokens == int(group.group[1:]) for group in batch.groups for sample in group.samples)


def test_samples_are_in_the_order_of_their_index():
    """Whatever the order of their verdicts, each with its own tokens, reward and advantage."""
    group = group_of((C, 4, False, 3), (W, 8, False, 2), (W, 6, False, 3))
    group.verdicts = {index: group.verdicts[index] for index in (2, 0, 1)}
    found = batch_group(recipe(punishment=False), "g", group, 4, {2: 2, 3: 3}).samples
    assert [(sample.payload, sample.tokens, sample.reward, sample.staleness) for sample in found] == [
        ("g:0", 4, 1.0, 0),
        ("g:1", 8, -1.0, 1),
        ("g:2", 6, -1.0, 0),
    ]
    assert [round(sample.advantage, 3) for sample in found] == [1.155, -0.577, -0.577]


def test_a_fully_masked_batch_has_no_cost():
    settings = recipe(punishment=False, filtering=True)
    group = group_of((C, 4, True, 3), (W, 16, True, 3), (W, 12, True, 3), (U, 4, False, 3))
    window = Window(settings)
    window.judged(group, "kept")
    batch = make_batch(settings, 4, AT_3, {"g": group}, SamplerState(cursor=0, next_group=0), window.metrics())
    assert "rollout_tokens_per_trained_token" not in batch.sampling_metrics


def test_the_step_of_a_version():
    policy = CommittedPolicy(version=9, step=3, version_steps='{"5": 2, "7": 3, "9": 3}')
    assert [policy.step_of(version) for version in (5, 7, 9)] == [2, 3, 3]
    assert [policy.step_of(version) for version in (6, 8, 70)] == [2, 3, 3], "the newest older version"
    assert policy.step_of(1) == 2, "too stale to be known"
    assert CommittedPolicy(version=9, step=3).step_of(7) == 3, "a rewind forgot all of them"
