"""Owns the test that a node on which engines cannot start costs its replica, and not the run.

Must not need Kubernetes: each pod's first process is started with the chart's command, side by side on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.pods import Cluster, Pod
from tests.harness.small_run import recipe_document
from tests.harness.workload import write_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

RUN_S = 300.0
BROKEN = {"VLLM_LOGGING_LEVEL": "broken"}
"""An engine that finds this in its environment fails while it starts."""


def replicas(view: dict[str, Any], state: str) -> int:
    return sum(process["service"] == "rollout" and process["state"] == state for process in view["processes"])


def ended(pod: Pod) -> int:
    """The exit status of a pod that ends by itself."""
    return pod.process.wait(RUN_S)


@pytest.mark.timeout(1500)
def test_a_bad_node_costs_one_replica_and_not_the_run(tmp_path: Path, tiny_model: Path) -> None:
    document = recipe_document(
        tiny_model,
        data={
            "source": "jsonl",
            "path": str(write_questions(tmp_path / "questions.jsonl")),
            "train": 44,
            "held_out": 12,
            "options": {},
        },
        rollout={"cpus": 2.0, "replicas": 2},
        learner={"cpus": 1.0, "learning_rate": 1e-4, "checkpoint_every": 2},
        limits={"rollout_steps": 6, "startup_timeout_s": 200},
        algorithm={"overlong": {"cache": 4}},
    )
    with Cluster(tmp_path) as cluster:
        cluster.set_bounds(rollout={"pods": 2, "cpus": 2, "gpus": 0})
        for role in ("cpu", "verifier", "learner", "rollout"):
            cluster.start_worker(role, role).until_ready()
        broken = cluster.start_worker("broken", "rollout", node="bad-node", **BROKEN)
        broken.until_ready()
        run = cluster.submit(document)
        cluster.until(run, lambda view: view["state"] == "running", "a replica on the other node", RUN_S)
        with cluster.paused(run):  # else it may end before the broken node is avoided
            assert ended(broken) == 1
            said = broken.said()
            assert "this pod ends, and is replaced: rollout avoids node bad-node until" in said
            assert "(3 failed there: died before they were ready; last: rollout-" in said
            view = cluster.until(run, lambda view: bool(view["alerts"]), "the alert", RUN_S)
            assert any(text.startswith("rollout avoids node bad-node until") for text in view["alerts"]), view["alerts"]

            # The pod that replaces it comes to the same node, and holds what others would get there.
            again = cluster.start_worker("again", "rollout", node="bad-node", **BROKEN)
            cluster.until(run, lambda view: replicas(view, "avoided") == 1, "the next pod", RUN_S)
        done = cluster.until(run, lambda view: view["state"] == "succeeded", "the end", RUN_S, ended=True)
        assert again.process.poll() is None, "it would be replaced for ever"
    assert done["rollout_steps"] == 6
    assert done["groups"]["reconciled"]
    phases = [event["phase"] for event in done["events"]]
    assert phases.count("node-avoided") == 1, phases
