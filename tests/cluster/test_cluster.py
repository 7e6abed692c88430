"""Owns the test that the pods of the chart work together: a run over several pods that drain, die and restart.

Must not need Kubernetes: each pod's first process is started with the chart's command, side by side on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.hosting.pod_registry import POD_DRAIN_S
from tests.cluster.pods import METRICS_PORTS, ROLES, Cluster
from tests.harness.small_run import recipe_document
from tests.harness.workload import write_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

RUN_S = 300.0
STEPS = 100_000  # more than fit into the test's time


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        for role in ROLES:
            cluster.start_worker(role, role).until_ready()
        yield cluster


def document(model: Path, questions: Path) -> dict[str, Any]:
    return recipe_document(
        model,
        data={"source": "jsonl", "path": str(questions), "train": 44, "held_out": 12, "options": {}},
        rollout={"cpus": 1.0},
        learner={"cpus": 1.0, "learning_rate": 1e-4, "checkpoint_every": 2},
        limits={"rollout_steps": STEPS, "startup_timeout_s": 200},
        algorithm={"overlong": {"cache": 4}},
    )


def versions(view: dict[str, Any]) -> list[int]:
    replicas = [process for process in view["processes"] if process["service"] == "rollout"]
    return [replica["version"] for replica in replicas if replica["state"] == "ready"]


@pytest.mark.timeout(1500)
def test_a_run_survives_pods_that_drain_die_and_restart(cluster: Cluster, tiny_model: Path, questions: Path) -> None:
    run = cluster.submit(document(tiny_model, questions))
    check_the_first_steps(cluster, run)
    check_a_second_pod_that_comes_and_drains(cluster, run)
    check_lost_pods(cluster, run)
    check_a_new_token(cluster, run)
    check_targets(cluster)
    check_the_end(cluster, run)


def check_the_first_steps(cluster: Cluster, run: str) -> None:
    rollout = cluster.pods["rollout"]
    # The pod is not ready between the replica's first heartbeat and its first verified policy version.
    rollout.until("/readyz", lambda status, text: status == 503 and f"rollout of {run}" in text)
    cluster.until(run, lambda view: view["state"] == "running" and view["rollout_steps"] >= 2, "two steps", RUN_S)
    rollout.until_ready()
    assert "rollout INFO" in rollout.said(), "a pod's log must contain its services' lines"


def check_a_second_pod_that_comes_and_drains(cluster: Cluster, run: str) -> None:
    refused = cluster.api.patch(f"/v1/runs/{run}/scale", json={"rollout": 3})
    assert refused.status_code == 422
    assert "expected 1 to 2" in refused.json()["detail"]
    cluster.set_bounds(rollout={"pods": 2, "cpus": 2, "gpus": 0})
    with cluster.paused(run):
        assert cluster.api.patch(f"/v1/runs/{run}/scale", json={"rollout": 3}).status_code == 202
        second = cluster.start_worker("rollout-2", "rollout")
        second.until("/readyz", lambda status, text: status == 200 or "rollout of" in text)
        # While the run trains, its engines would leave a third one little of two cores.
        cluster.until(run, lambda view: len(versions(view)) == 3, "three replicas over two pods", RUN_S)
    second.until_ready()

    assert second.terminate() == 0
    assert f"did not drain within {POD_DRAIN_S:g} s" not in second.said()
    cluster.set_bounds()
    view = cluster.until(run, lambda view: len(versions(view)) == 2, "the fleet within its bounds", RUN_S)
    assert view["rollout_replicas"] == 3, "the desired number must not change"


def check_lost_pods(cluster: Cluster, run: str) -> None:
    cluster.pods["head"].kill()
    cluster.until_steps(run, 3, "the fleets without a head", RUN_S)
    with cluster.paused(run):
        cluster.start_head()
    cluster.until(run, lambda view: view["state"] == "running", "the next controller", RUN_S)

    cluster.pods["learner"].kill()
    with cluster.paused(run):
        successor = cluster.start_worker("learner-2", "learner")
        successor.until("/readyz", lambda status, text: status == 200 or "learner of" in text)
    cluster.until_steps(run, 2, "the next learner", RUN_S)


def check_a_new_token(cluster: Cluster, run: str) -> None:
    """As in docs/operations/redis.md, Ray's token: pods with the old one cannot join those with the new one."""
    before = cluster.until(run, lambda _: True, "the run", RUN_S)
    cluster.exchange_token()
    cluster.start_head()
    workers = [cluster.start_worker(f"{role}-again", role) for role in ROLES]
    for worker in workers:
        worker.until("/readyz", lambda status, text: status == 200 or " of " in text)
    view = cluster.until(run, lambda view: view["rollout_steps"] >= before["rollout_steps"] + 2, "two steps", RUN_S)
    assert view["groups"]["reconciled"]


def check_targets(cluster: Cluster) -> None:
    """Prometheus gets targets with ports that a network policy can name."""
    ends = time.monotonic() + 60
    while True:  # the heartbeat of a stalled process expires
        groups = cluster.api.get("/v1/prometheus/targets").json()
        services = {group["labels"]["service"] for group in groups}
        if {"api", "controller", "sampler", "verifier", "rollout", "learner"} <= services:
            break
        assert time.monotonic() < ends, services
        time.sleep(0.3)
    for group in groups:
        if group["labels"]["service"] != "api":
            assert int(group["targets"][0].rpartition(":")[2]) in METRICS_PORTS


def check_the_end(cluster: Cluster, run: str) -> None:
    assert cluster.api.post(f"/v1/runs/{run}/cancel").status_code == 202
    done = cluster.until(run, lambda view: view["state"] == "cancelled", "the end", 60, ended=True)
    assert done["groups"]["reconciled"]
    assert done["groups"]["trained"] > 0
    assert cluster.pods["head"].terminate(deadline_s=30.0) == 0
