"""Owns the tests of what a cluster allows rewards: hosts, functions with needs, programs.

Must not need a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.settings import ClusterLimits, ClusterLimitsError, Recipe, RecipeError, check_reward_limits, parse_recipe
from services.settings.cluster_limits import VARIABLE, role_requests
from services.settings.rewards.limits import verifier_role
from tests.harness.small_run import recipe_document

POD = {"pods": 1, "cpus": 2, "gpus": 0}
ROLES: dict[str, Any] = dict.fromkeys(("cpu", "verifier", "rollout", "learner"), POD)
URL = "https://rewards.internal/score"
JUDGE = {"judge": {"url": "http://judge.example/v1", "model": "m", "rubric": "./rubric.md"}}
NEEDY = {"python": {"function": "./rewards.py:score", "needs": ["network", "files"]}}


def recipe(reward: Any, **named: Any) -> Recipe:
    data = {"source": "jsonl", "path": "/data/train.jsonl", "layout": "fields", "verifier": reward}
    return parse_recipe(recipe_document("/model", data=data, verifier={"rewards": named}))


def faults(wanted: Recipe, code: int = 0, **rewards: Any) -> list[str]:
    code_pods: Mapping[str, Any] = {"verifier_code": {**POD, "pods": code}} if code else {}
    return ClusterLimits.model_validate({**ROLES, **code_pods, "rewards": rewards}).reward_faults(wanted)


@pytest.mark.parametrize("reward", ["math", "python:./rewards.py:score", {"all": ["math", "answer-line"]}])
def test_what_stays_in_the_verifier_is_always_allowed(reward: Any) -> None:
    assert faults(recipe(reward)) == []
    assert verifier_role(recipe(reward).rewards) == "verifier"


def test_a_host_is_allowed_only_if_it_is_named() -> None:
    assert faults(recipe(URL), hosts=["rewards.internal"]) == []
    assert faults(recipe("https://Rewards.Internal.:8443/x"), hosts=["rewards.internal"]) == []
    assert faults(recipe(URL), hosts=["internal", "judge.example"]) == [
        "data.verifier: 'rewards.internal' is not valid: expected a host of the chart's verifier.rewardHosts "
        "(internal, judge.example)"
    ]
    assert faults(recipe(URL)) == [
        "data.verifier: 'rewards.internal' is not valid: expected a host of the chart's verifier.rewardHosts "
        "(it has none)"
    ]


def test_the_setting_that_states_a_reward_is_named() -> None:
    found = faults(recipe({"all": ["math", "mine", JUDGE]}, mine=URL))
    assert [fault.split(" is not")[0] for fault in found] == [
        "data.verifier: 'judge.example'",
        "verifier.rewards.mine: 'rewards.internal'",
    ]
    assert faults(recipe("mine", mine=URL), hosts=["rewards.internal"]) == []


def test_functions_with_needs_require_their_pods() -> None:
    assert faults(recipe(NEEDY), functions=True) == []
    assert faults(recipe(NEEDY)) == [
        "data.verifier: './rewards.py:score (needs: network, files)' is not valid: expected no `needs`, because the "
        "chart's rewardFunctions.enabled is false"
    ]


def test_programs_require_their_pods() -> None:
    assert faults(recipe("code"), code=1) == []
    assert faults(recipe({"all": ["math", {"code": {"partial": False}}]})) == [
        "data.verifier: 'code' is not valid: expected another reward, because the chart's verifierCode.maxReplicas is 0"
    ]


@pytest.mark.parametrize(("other", "shown"), [(URL, "rewards.internal"), (NEEDY, "./rewards.py:score (needs: ")])
def test_programs_and_what_leaves_the_pod_exclude_each_other(other: Any, shown: str) -> None:
    (fault,) = faults(recipe("code", mine=other), code=1, hosts=["rewards.internal"], functions=True)
    assert fault.startswith(f"verifier.rewards.mine: '{shown}")
    assert "beside a `code` reward" in fault


def test_programs_move_the_verifiers_to_their_own_role() -> None:
    programs, others = recipe({"all": ["mine", "math"]}, mine="code"), recipe("math")
    assert verifier_role(programs.rewards) == "verifier-code"
    assert set(role_requests(programs, 1)) == {"rollout", "verifier-code", "learner", "cpu"}
    assert role_requests(programs, 1)["verifier-code"] == role_requests(others, 1)["verifier"]
    allowed = ClusterLimits.model_validate({**ROLES, "verifier_code": {"pods": 2, "cpus": 0.4, "gpus": 0}})
    too_many = {"verifier-code": role_requests(programs, 1)["verifier-code"] * 9}
    assert "verifierCode.maxReplicas" in (allowed.shortage(too_many, {}) or "")
    assert allowed.shortage({"verifier-code": too_many["verifier-code"][:1]}, {}) is None


def test_a_submission_is_checked_against_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_reward_limits(recipe(URL))  # a laptop has no limits
    path = tmp_path / "bounds.json"
    monkeypatch.setenv(VARIABLE, str(path))
    check_reward_limits(recipe("math"))  # and what needs none does not wait for a readable file
    with pytest.raises(ClusterLimitsError):
        check_reward_limits(recipe(URL))
    path.write_text(json.dumps(ROLES))
    with pytest.raises(RecipeError, match=r"^data\.verifier: 'rewards\.internal' is not valid: "):
        check_reward_limits(recipe(URL))
    path.write_text(json.dumps({**ROLES, "rewards": {"hosts": ["rewards.internal"]}}))
    check_reward_limits(recipe(URL))
