"""Owns what Kubernetes, KubeRay and Helm do to the pods of a release on day two, in the order in which they do it.

Must not decide what a test expects. The pods are those of tests/cluster/pods.py, one per worker group.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.cluster.pods import ROLES, Cluster, Pod
from tests.helm.cases import CPU
from tests.helm.rendering import render

GRACE_S = 90.0
"""terminationGracePeriodSeconds of the chart's Ray pods: later the kubelet kills what is left."""
COMPONENT = "app.kubernetes.io/component"


def budgets() -> dict[str, int]:
    """Component -> the least number of pods that its disruption budget keeps, as the chart renders it without GPUs."""
    found = {}
    for budget in render(CPU).all("PodDisruptionBudget"):
        spec = budget.document["spec"]
        if "minAvailable" in spec:
            found[spec["selector"]["matchLabels"][COMPONENT]] = int(spec["minAvailable"])
    return found


class Operations:
    """Evictions, deletions and replacements of one cluster's pods. `generation` numbers the pods of each role."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.current = {role: role for role in ROLES}
        """Role -> the name of the pod that runs now."""
        self._generation = 1

    def pod(self, role: str) -> Pod:
        """The pod of a role that runs now."""
        return self.cluster.pods["head" if role == "head" else self.current[role]]

    def drain_node(self, least: Mapping[str, int]) -> list[str]:
        """`kubectl drain` of the node with all Ray pods: evict those that the budgets allow; returns the others.

        An eviction is refused if fewer ready pods than the budget's number would be left.
        """
        refused = [role for role in ("head", *ROLES) if self._ready(role) - 1 < least.get(role, 0)]
        self.end(*(role for role in ("head", *ROLES) if role not in refused))
        return refused

    def _ready(self, role: str) -> int:
        return int(self.pod(role).probe("/readyz")[0] == 200)

    def end(self, *roles: str) -> None:
        """Send SIGTERM to the pods of these roles, all at once, and wait until they have ended within their grace."""
        pods = [self.pod(role) for role in roles]
        for pod in pods:
            pod.process.terminate()
        ends = time.monotonic() + GRACE_S
        for pod in pods:
            status = pod.process.wait(max(0.0, ends - time.monotonic()))
            assert status == 0, f"{pod.name} ended with {status}\n{pod.said()[-4000:]}"

    def start(self, *roles: str) -> None:
        """Start the replacements of ended pods, the head first, as KubeRay does; wait until they host services."""
        if "head" in roles:
            self.cluster.start_head()
        self._generation += 1
        started = []
        for role in ROLES:
            if role in roles:
                self.current[role] = f"{role}-{self._generation}"
                started.append(self.cluster.start_worker(self.current[role], role))
        for pod in started:
            # Joined is enough: a pod becomes ready only after the engine in it, which needs the other pods.
            pod.until("/readyz", lambda status, text: status == 200 or "not ready" in text)

    def upgrade(self) -> None:
        """`helm upgrade` with another image: KubeRay's `Recreate` deletes every pod and then creates all again."""
        self.end("head", *ROLES)
        self.start("head", *ROLES)

    @contextmanager
    def kubernetes(self, name: str) -> Iterator[httpx.Client]:
        """A client of the part of the API that the hook of `helm uninstall` calls, for the RayCluster `name`.

        Deleting the cluster ends its pods, as KubeRay does; the object is gone once they are.
        """
        ending: list[threading.Thread] = []

        class Handler(BaseHTTPRequestHandler):
            def do_DELETE(handler) -> None:  # noqa: N805 - `self` is the operations
                if not ending:
                    ending.append(threading.Thread(target=self.end, args=("head", *ROLES), name="kuberay"))
                    ending[0].start()
                handler.answer(200, {"kind": "RayCluster"})

            def do_GET(handler) -> None:  # noqa: N805
                alive = [role for role in ("head", *ROLES) if self.pod(role).process.poll() is None]
                if "/pods" in handler.path:
                    handler.answer(200, {"items": [{"metadata": {"name": role}} for role in alive]})
                else:
                    handler.answer(200 if alive else 404, {"kind": "RayCluster", "metadata": {"name": name}})

            def answer(handler, status: int, document: object) -> None:  # noqa: N805
                body = json.dumps(document).encode()
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), name="kubernetes")
        serving.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}") as client:
                yield client
        finally:
            server.shutdown()
            serving.join()
            server.server_close()
            for thread in ending:
                thread.join()
