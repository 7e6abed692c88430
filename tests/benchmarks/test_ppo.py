"""The comparison of PPO with DAPO gives both the same task and the same budget."""

from __future__ import annotations

import json

import pytest

from benchmarks.studies.ppo.__main__ import ALGORITHMS, RESULTS, curve, recipe


def test_both_algorithms_share_all_but_the_algorithm() -> None:
    dapo, ppo = (recipe(algorithm, 0) for algorithm in ALGORITHMS)
    for section in ("model", "data", "verifier", "rollout", "weights", "evaluation", "seed"):
        assert getattr(dapo, section) == getattr(ppo, section), section
    assert dapo.limits.response_tokens == ppo.limits.response_tokens
    assert dapo.learner.learning_rate == ppo.learner.learning_rate
    sizes = [(each.limits.groups_per_step, each.learner.mini_batch_groups) for each in (dapo, ppo)]
    responses = [
        [groups * each.algorithm.group_size for groups in size] for each, size in zip((dapo, ppo), sizes, strict=True)
    ]
    assert responses == [[64, 32], [64, 32]], "responses per rollout step, and per optimizer step"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_stored_results_are_of_whole_runs(algorithm: str) -> None:
    result = json.loads((RESULTS / f"{algorithm}-0.json").read_text())
    assert {"before", "after"} <= {evaluation["name"] for evaluation in result["evaluations"]}
    tokens, _ = curve(result, "accuracy")[-1]
    assert recipe(algorithm, 0).limits.response_tokens is not None
    assert tokens >= 9_000
    assert bool(curve(result, "value_explained_variance")) is (algorithm == "ppo")
