"""Rehearses day two with one run on the chart's pods, in the order of their objects: a drained node, an upgrade, new
passwords, a lost volume of Redis, an uninstall and a new install.

Must not need Kubernetes: tests/cluster/operations.py does to the pods what Kubernetes, KubeRay and Helm do.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.hosting.pod_registry import POD_DRAIN_S
from deploy.kubernetes.uninstall import remove_cluster
from tests.cluster.operations import GRACE_S, Operations, budgets
from tests.cluster.pods import ROLES, Cluster
from tests.cluster.test_cluster import RUN_S, document
from tests.harness.programs import needed
from tests.harness.workload import write_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    needed("redis-cli")  # for Redis' backup
    with Cluster(tmp_path_factory.mktemp("cluster"), kubelet=True) as cluster:
        for role in ROLES:
            cluster.start_worker(role, role).until_ready()
        yield cluster


@pytest.mark.timeout(1800)
def test_a_run_survives_day_two(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    operations = Operations(cluster)
    run = cluster.submit(document(tiny_model, write_questions(tmp_path / "questions.jsonl")))
    cluster.until(run, lambda view: view["rollout_steps"] >= 3, "three steps", RUN_S)
    check_a_drained_node(operations, run)
    check_an_upgrade(operations, run)
    check_new_passwords(operations, run)
    check_a_lost_volume(operations, run)
    check_uninstall_and_install(operations, run)
    assert cluster.api.post(f"/v1/runs/{run}/cancel").status_code == 202
    done = cluster.until(run, lambda view: view["state"] == "cancelled", "the end", 60, ended=True)
    assert done["groups"]["reconciled"]


def check_a_drained_node(operations: Operations, run: str) -> None:
    """The budgets let the stateless pods go; the others wait for `kubectl delete pod`."""
    cluster = operations.cluster
    operations.pod("rollout").until_ready()
    refused = operations.drain_node(budgets())
    assert refused == ["head", "rollout", "learner"]
    with cluster.paused(run):
        operations.start("cpu", "verifier")
    cluster.until_steps(run, 1, "the run with other cpu and verifier pods", RUN_S)
    operations.end(*refused)
    operations.start(*refused)
    check_it_goes_on(operations, run, "the run on another node")


def check_an_upgrade(operations: Operations, run: str) -> None:
    operations.upgrade()
    check_it_goes_on(operations, run, "the run after an upgrade")


def check_new_passwords(operations: Operations, run: str) -> None:
    """The order of docs/operations/redis.md, "Changing passwords": no pod but Ray's head is replaced."""
    server = operations.cluster.redis
    previous = dict(server.passwords)
    server.passwords = {user: secrets.token_hex(16) for user in previous}
    server.set_secret({f"{user}-password-other": password for user, password in server.passwords.items()})
    server.set_secret(
        {f"{user}-password": password for user, password in server.passwords.items()}
        | {f"{user}-password-other": password for user, password in previous.items()}
    )
    with operations.cluster.paused(run):
        operations.end("head")
        operations.start("head")
    server.set_secret({f"{user}-password-other": None for user in previous})
    for user, password in previous.items():
        with pytest.raises(redis.AuthenticationError):
            server.process.client(username=user, password=password).ping()
    # Connections that are open stay open: a restart shows that all processes log in with the new password.
    server.process.stop()
    server.process.start()
    check_it_goes_on(operations, run, "the run with new passwords")
    groups = operations.cluster.until(run, lambda _: True, "the run", RUN_S)["groups"]
    assert groups["dead"] == 0, "pods that end in order lose no group"


def check_a_lost_volume(operations: Operations, run: str) -> None:
    cluster = operations.cluster
    before = cluster.until(run, lambda _: True, "the run before the backup", RUN_S)["rollout_steps"]
    backup = cluster.redis.command("backup")
    cluster.until_steps(run, 1, "a step that the backup does not have", RUN_S)
    cluster.redis.lose_volume()
    cluster.redis.restore(backup)
    cluster.until(run, lambda view: view["rollout_steps"] >= before, "the run from the backup", RUN_S)
    check_it_goes_on(operations, run, "the run after a lost volume")


def check_uninstall_and_install(operations: Operations, run: str) -> None:
    """The hook ends the pods while Redis runs; then Helm deletes Redis and API. Redis' volume and the claim stay."""
    cluster = operations.cluster
    with operations.kubernetes("penstock") as kubernetes:
        remove_cluster(kubernetes, "penstock", "penstock", GRACE_S)
    client = cluster.redis.process.client(username="penstock", password=cluster.redis.passwords["penstock"])
    lanes = list(client.scan_iter(f"penstock:{{{run}}}:*tasks"))
    assert lanes, "the streams of tasks"
    held = {key: client.xpending(key, "rollout")["pending"] for key in lanes}
    client.close()
    assert set(held.values()) == {0}, f"leases that no pod returned: {held}"
    cluster.redis.process.stop()
    cluster.stop_api()

    cluster.redis.process.start()
    cluster.start_api()
    operations.start("head", *ROLES)
    check_it_goes_on(operations, run, "the run after an uninstall and an install")


def check_it_goes_on(operations: Operations, run: str, what: str) -> None:
    cluster = operations.cluster
    cluster.until(run, lambda view: view["state"] == "running", f"{what} runs", RUN_S)
    cluster.until_steps(run, 2, what, RUN_S)
    view = cluster.until(run, lambda _: True, what, RUN_S)
    assert view["groups"]["reconciled"], what
    for pod in cluster.pods.values():
        assert f"did not drain within {POD_DRAIN_S:g} s" not in pod.said(), pod.name
