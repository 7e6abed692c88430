"""Owns the removal of the Ray cluster at `helm uninstall`, before Redis: its processes release their work in Redis.

Must not import ray, nor change any object but that cluster.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import time
from pathlib import Path

import httpx

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POLL_S = 2.0
CALL_S = 10.0


class UninstallError(RuntimeError):
    """The cluster was not removed in time, or removing it is not permitted. The text is one line."""


def remove_cluster(kubernetes: httpx.Client, namespace: str, cluster: str, timeout_s: float) -> None:
    """Delete a RayCluster and wait until it and its pods are gone. A cluster that does not exist counts as gone.

    KubeRay ends the pods, which drain, and then removes Ray's keys from Redis. Raises UninstallError.
    """
    deadline = time.monotonic() + timeout_s
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{cluster}"
    _call(kubernetes, "DELETE", path, deadline)
    while _call(kubernetes, "GET", path, deadline) is not None:
        _wait(deadline, f"RayCluster {cluster} still exists; check that KubeRay's operator is running")
    pods = f"/api/v1/namespaces/{namespace}/pods?labelSelector=ray.io/cluster%3D{cluster}"
    while (_call(kubernetes, "GET", pods, deadline) or {}).get("items"):
        _wait(deadline, f"pods of RayCluster {cluster} still exist")


def _call(kubernetes: httpx.Client, method: str, path: str, deadline: float) -> dict[str, list[object]] | None:
    """The answer; None if the object does not exist. Retries until the deadline while the server does not answer."""
    while True:
        try:
            answer = kubernetes.request(method, path, timeout=CALL_S)
        except httpx.TransportError as error:
            problem = f"the Kubernetes API does not answer: {error}"
        else:
            if answer.status_code == httpx.codes.NOT_FOUND:
                return None
            if answer.is_success:
                return dict(answer.json())
            problem = f"{method} {path} was answered with {answer.status_code}: {answer.text[:200]}"
            if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                raise UninstallError(problem)
        _wait(deadline, problem)


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() >= deadline:
        raise UninstallError(f"{problem}; `helm uninstall --no-hooks` uninstalls without waiting")
    time.sleep(POLL_S)


def _in_cluster() -> httpx.Client:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    bracketed = f"[{host}]" if ":" in host else host
    return httpx.Client(
        base_url=f"https://{bracketed}:{port}",
        headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
        verify=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
    )


def main() -> int:
    """Remove the cluster; returns 0 once it is gone, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.uninstall")
    parser.add_argument("--cluster", required=True, help="name of the RayCluster")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds")
    arguments = parser.parse_args()
    try:
        with _in_cluster() as kubernetes:
            remove_cluster(kubernetes, arguments.namespace, arguments.cluster, arguments.timeout)
    except (UninstallError, OSError, KeyError) as error:
        print(f"uninstall: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
