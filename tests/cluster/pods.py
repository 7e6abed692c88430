"""Owns a cluster of pods on one machine: the processes of the chart's pods, started with the chart's variables.

Must not be used outside tests. It adds what KubeRay adds: the command that starts Ray, its address and its token.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray

from services.api.access.tokens import token_digest
from tests.harness.api_access import HEADERS, TOKEN
from tests.harness.free_ports import free_port
from tests.harness.process_trees import end_tree
from tests.harness.servers.release_redis import ReleaseRedis

READY_S = 300.0
REDIS_MAXMEMORY = "1500mb"
STARTS = 10
"""The maximum number of starts of a pod within its deadline; KubeRay restarts pods without a limit."""
AGENTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
ROLES = ("cpu", "verifier", "rollout", "learner")
BOUNDS = {role: {"pods": 1, "cpus": 2, "gpus": 0} for role in ROLES}
METRICS_PORTS = range(32000, 32100)
"""Outside the range of `free_port`."""


class Pod:
    """One pod's first process, with its log and its probes; restarted if it fails to start, as KubeRay does."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self.port = free_port()
        self._arguments = [sys.executable, "-m", *command, "--probe-port", str(self.port)]
        self._environment = {**os.environ, **environment, "PENSTOCK_POD": str(folder / name)}
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("a") as output:
            self.process = subprocess.Popen(
                self._arguments, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        """The log of all starts. Native libraries also write bytes there that are no text."""
        return self._log.read_text(errors="replace")

    def probe(self, path: str) -> tuple[int, str]:
        """The status and text of a probe; status 0 when the pod does not answer."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=3.0)
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text.strip()

    def until(self, path: str, holds: Callable[[int, str], bool], deadline_s: float = READY_S) -> str:
        """Wait until a probe's answer satisfies `holds`; returns its text."""
        ends = time.monotonic() + deadline_s
        while not holds(*(seen := self.probe(path))):
            if self.process.poll() is not None:
                assert self._starts < STARTS, f"{self.name} ended\n{self.said()[-4000:]}"
                self._start()
            assert time.monotonic() < ends, f"{self.name}{path}: {seen}\n{self.said()[-4000:]}"
            time.sleep(0.3)
        return seen[1]

    def until_ready(self) -> None:
        """Wait for the readiness probe."""
        self.until("/readyz", lambda status, _: status == 200)

    def terminate(self, deadline_s: float = 60.0) -> int:
        """Send SIGTERM, as Kubernetes does; returns the exit status. Raises TimeoutExpired at the deadline."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def kill(self) -> None:
        """End all processes of the pod at once, like a lost node; no effect if they have ended."""
        end_tree(self.process)


class Cluster:
    """Redis by the chart's start script, the API and Ray's pods. Use as a context manager; no process is left.

    `kubelet`: a head that ends, or fails its liveness probe, is started again while the test waits for a run.
    """

    def __init__(self, folder: Path, *, kubelet: bool = False) -> None:
        self.folder = folder
        self._kubelet = kubelet
        self.bounds = folder / "bounds.json"
        self.set_bounds()
        self.api_process: subprocess.Popen[bytes] | None = None
        redis_folder = Path(tempfile.mkdtemp(prefix="penstock-redis-", dir="/tmp"))
        redis_folder.chmod(0o755)  # the server's user reaches it
        self.redis = ReleaseRedis(redis_folder, REDIS_MAXMEMORY=REDIS_MAXMEMORY)
        self.pods: dict[str, Pod] = {}
        self._ray_folders: list[str] = []
        self._gcs = free_port()
        self._api_port = free_port()
        self._host = ray.util.get_node_ip_address()
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PENSTOCK_HOST": self._host,
            "PENSTOCK_RUNS": str(folder / "runs"),
            "PENSTOCK_BOUNDS": str(self.bounds),
            "PENSTOCK_METRICS_PORTS": f"{METRICS_PORTS.start}-{METRICS_PORTS.stop - 1}",
            "PENSTOCK_REDIS": f"redis://127.0.0.1:{self.redis.port}/0",
            "PENSTOCK_REDIS_USERNAME": "penstock",
            "PENSTOCK_REDIS_PASSWORD_FILE": str(self.redis.password_file),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(20),
            # Pods have their own process ids and networks; here they share the machine's ports.
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis.port}",
            "RAY_external_storage_namespace": "penstock-test",
        }
        access = folder / "access.json"
        access.write_text(
            json.dumps({"tokens": [{"name": "tests", "sha256": token_digest(TOKEN), "roles": {"*": "admin"}}]})
        )
        self._environment["PENSTOCK_ACCESS"] = str(access)
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{self._api_port}", timeout=20, headers=HEADERS)

    def set_bounds(self, **roles: dict[str, float]) -> None:
        """Change the bounds, as `helm upgrade` does."""
        self.bounds.write_text(json.dumps({**BOUNDS, **roles}))

    def __enter__(self) -> Cluster:
        try:
            self.start_api()
            self.start_head()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_api(self) -> None:
        """Start the API's pod, or its replacement."""
        command = [sys.executable, "-m", "services.api", "--port", str(self._api_port)]
        with (self.folder / "api.log").open("a") as output:
            own = {**os.environ, **self._environment}
            self.api_process = subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT)

    def stop_api(self) -> None:
        """End the API's pod with SIGTERM."""
        assert self.api_process is not None
        self.api_process.terminate()
        self.api_process.wait(30.0)

    def start_head(self) -> Pod:
        """Start the head pod, or its replacement."""
        options = (
            f"--head --port={self._gcs} --num-cpus=0 --include-dashboard=false --temp-dir={self._new_ray_folder()} "
            f"--ray-client-server-port={free_port()} "
            '--redis-username="$REDIS_USERNAME" --redis-password="$REDIS_PASSWORD"'
        )
        login = {"REDIS_USERNAME": "ray", "REDIS_PASSWORD": self.redis.passwords["ray"]}
        line = {**self._line("head", "head", options), **login}
        self.pods["head"] = Pod("head", ["deploy.kubernetes.head"], line, self.folder)
        self.pods["head"].until_ready()
        return self.pods["head"]

    def _new_ray_folder(self) -> str:
        """An empty folder, as in a new container; its path is short, for Ray's sockets."""
        self._ray_folders.append(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
        return self._ray_folders[-1]

    def exchange_token(self) -> None:
        """End all of Ray's pods, as `kubectl delete pod` with grace 0; those started from now on have a new token."""
        for pod in self.pods.values():
            pod.kill()
        self.pods.clear()
        self._environment["RAY_AUTH_TOKEN"] = secrets.token_hex(20)

    def start_worker(self, name: str, role: str, cpus: float = 2, node: str = "", **variables: str) -> Pod:
        """Start a pod of a worker group, without waiting until it is ready; by default each has its own node."""
        line = self._line(name, role, f"--address={self._host}:{self._gcs} --num-cpus={cpus}")
        # KubeRay sets this if Ray's state is in Redis; otherwise a worker without a head ends after 60 s.
        line["RAY_gcs_rpc_server_reconnect_timeout_s"] = "600"
        line |= {"PENSTOCK_NODE": node or name} | variables
        self.pods[name] = Pod(name, ["deploy.kubernetes.node", "--role", role], line, self.folder)
        return self.pods[name]

    def _line(self, name: str, role: str, options: str) -> dict[str, str]:
        resources = json.dumps({f"penstock-{role}": 1000})
        # Ray waits only 15 s for the ports of its agents, too short on a busy machine: choose the ports here.
        ports = " ".join(f"--{agent}-port={free_port()}" for agent in AGENTS)
        line = (
            f"ray start {options} {ports} --resources='{resources}' --object-store-memory=80000000 "
            f"--min-worker-port=0 --max-worker-port=0 --disable-usage-stats --block"
        )
        return {**self._environment, "KUBERAY_GEN_RAY_START_CMD": line}

    def submit(self, document: dict[str, Any]) -> str:
        """Submit a run through the REST API; returns its id."""
        answer = self.api.post("/v1/runs", json={"recipe": document})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def until(
        self, run: str, holds: Callable[[dict[str, Any]], bool], what: str, deadline_s: float, ended: bool = False
    ) -> dict[str, Any]:
        """Wait until the run's view satisfies `holds`; returns it. Fails if the run ends first, unless `ended`."""
        ends = time.monotonic() + deadline_s
        while True:
            if self._kubelet:
                self._restart_dead_head()
            view: dict[str, Any] = self.api.get(f"/v1/runs/{run}").raise_for_status().json()
            if holds(view):
                return view
            shown = json.dumps({**view, "recipe": None}, indent=1)[-5000:]
            assert ended or view["state"] not in ("failed", "cancelled", "succeeded"), f"{what}: {shown}"
            assert time.monotonic() < ends, f"{what}: not within {deadline_s:g} s\n{shown}"
            time.sleep(0.3)

    def _restart_dead_head(self) -> None:
        # Its control store does not connect again to a Redis that restarts.
        head = self.pods.get("head")
        if head is not None and (head.process.poll() is not None or head.probe("/healthz")[0] == 503):
            head.kill()
            self.start_head()

    def until_steps(self, run: str, steps: int, what: str, deadline_s: float) -> None:
        """Wait until the run has trained this many more rollout steps."""
        before = self.until(run, lambda _: True, what, deadline_s)["rollout_steps"]
        self.until(run, lambda view: view["rollout_steps"] >= before + steps, what, deadline_s)

    @contextmanager
    def paused(self, run: str) -> Iterator[None]:
        """Pause the run while pods start: `ray start` fails after 30 s, and the engines use all cores."""
        assert self.api.post(f"/v1/runs/{run}/pause").status_code == 202
        try:
            yield
        finally:
            assert self.api.post(f"/v1/runs/{run}/resume").status_code == 202

    def close(self) -> None:
        """End all that was started, each part even if ending another one fails."""
        with ExitStack() as ending:
            for folder in self._ray_folders:
                ending.callback(shutil.rmtree, folder, ignore_errors=True)
            ending.callback(shutil.rmtree, self.redis.folder)
            ending.callback(self.redis.process.stop)
            if self.api_process is not None:
                ending.callback(end_tree, self.api_process)
            ending.callback(self.api.close)
            for pod in self.pods.values():
                ending.callback(pod.kill)
