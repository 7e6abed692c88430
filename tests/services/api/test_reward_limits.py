"""Owns the tests of submissions whose rewards the cluster does not allow.

Must not repeat each rule; tests/services/settings/test_reward_limits.py has them.
"""

from __future__ import annotations

import json

import pytest

from services.settings.cluster_limits import VARIABLE
from tests.harness.small_run import recipe_document

ROLES = {role: {"pods": 1, "cpus": 2, "gpus": 0} for role in ("cpu", "verifier", "rollout", "learner")}


@pytest.mark.parametrize(
    ("reward", "allowed", "expected"),
    [
        (
            "https://rewards.internal/score",
            {"rewards": {"hosts": ["judge.example"]}},
            "data.verifier: 'rewards.internal' is not valid: expected a host of the chart's verifier.rewardHosts "
            "(judge.example)",
        ),
        (
            {"python": {"function": "scoring.tests:score", "needs": ["network"]}},
            {},
            "data.verifier: 'scoring.tests:score (needs: network)' is not valid: expected no `needs`, because the "
            "chart's rewardFunctions.enabled is false",
        ),
        (
            "code",
            {"rewards": {"functions": True}},
            "data.verifier: 'code' is not valid: expected another reward, because the chart's verifierCode.maxReplicas "
            "is 0",
        ),
    ],
)
async def test_a_reward_that_is_not_allowed_is_refused(
    api, run_id, tmp_path, monkeypatch, reward, allowed, expected
) -> None:
    (tmp_path / "bounds.json").write_text(json.dumps({**ROLES, **allowed}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "bounds.json"))
    data = {"source": "jsonl", "path": "/data/train.jsonl", "layout": "fields", "verifier": reward}
    document = recipe_document("/model", data=data)
    answer = await api.post("/v1/runs", json={"id": run_id, "recipe": document})
    assert (answer.status_code, answer.json()["detail"]) == (422, expected)
    assert (await api.get(f"/v1/runs/{run_id}")).status_code == 404
