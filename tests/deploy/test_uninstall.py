"""The hook that ends the Ray cluster before Redis is deleted."""

from __future__ import annotations

import httpx
import pytest

from deploy.kubernetes import uninstall
from deploy.kubernetes.uninstall import UninstallError, remove_cluster


class Kubernetes:
    """Answers as the API server does, from a list of answers per path whose last is repeated. Records the requests."""

    def __init__(self, cluster: list[int], pods: list[int]) -> None:
        self.cluster, self.pods = cluster, pods
        self.requests: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        if request.url.path.endswith("/pods"):
            assert request.url.params["labelSelector"] == "ray.io/cluster=penstock"
            return httpx.Response(
                200, json={"items": [{}] * (self.pods.pop(0) if len(self.pods) > 1 else self.pods[0])}
            )
        code = 200 if request.method == "DELETE" else self.cluster.pop(0) if len(self.cluster) > 1 else self.cluster[0]
        return httpx.Response(code, json={"kind": "RayCluster"})

    def remove(self, timeout_s: float = 5.0) -> None:
        with httpx.Client(transport=httpx.MockTransport(self), base_url="https://kubernetes") as client:
            remove_cluster(client, "ml", "penstock", timeout_s)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uninstall, "POLL_S", 0.01)


def test_waits_for_the_cluster_and_then_for_its_pods() -> None:
    kubernetes = Kubernetes(cluster=[200, 200, 404], pods=[2, 1, 0])
    kubernetes.remove()
    path = "/apis/ray.io/v1/namespaces/ml/rayclusters/penstock"
    pods = "/api/v1/namespaces/ml/pods"
    assert kubernetes.requests == [f"DELETE {path}", *[f"GET {path}"] * 3, *[f"GET {pods}"] * 3]


def test_retries_while_the_server_does_not_answer() -> None:
    kubernetes = Kubernetes(cluster=[500, 429, 404], pods=[0])
    kubernetes.remove()


def test_a_cluster_that_stays_is_an_error_with_a_remedy() -> None:
    with pytest.raises(
        UninstallError, match=r"RayCluster penstock still exists; check that KubeRay's operator.*--no-hooks"
    ):
        Kubernetes(cluster=[200], pods=[0]).remove(timeout_s=0.1)


def test_pods_that_stay_are_an_error() -> None:
    with pytest.raises(UninstallError, match="pods of RayCluster penstock still exist"):
        Kubernetes(cluster=[404], pods=[1]).remove(timeout_s=0.1)


def test_a_rejection_is_not_retried() -> None:
    kubernetes = Kubernetes(cluster=[403], pods=[0])
    with pytest.raises(UninstallError, match="answered with 403"):
        kubernetes.remove()
    assert len(kubernetes.requests) == 2
