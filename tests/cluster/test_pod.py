"""Owns the tests of a pod's first process that need no Ray: errors, probes and the registry of hosted processes.

Must not start Ray; test_cluster does.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from ray.exceptions import RpcError

from deploy.hosting.hosted_service import HostedService
from deploy.hosting.nodes import ray_node
from deploy.hosting.nodes.ray_node import Node, StoreWatch
from deploy.hosting.pod_registry import POD_DRAIN_S, VARIABLE, PodProcess, PodRegistry
from deploy.kubernetes import head, node, node_facts
from deploy.kubernetes import pod as pods
from deploy.kubernetes.head import RAY_ADDRESS, RAY_PASSWORD, RAY_USER, control_store_url
from deploy.kubernetes.pod import COMMAND, Pod, PodError
from deploy.kubernetes.probes import Probes
from services.process.hosting import Context
from services.settings import parse_recipe
from services.streams.connection.url import parse_redis_url
from services.streams.state.runs import RunRecords
from tests.deploy.echo_service import EchoService
from tests.harness.each import each
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    """A pod whose end ends nothing: the processes of this one belong to other tests too, such as the shared Redis."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "pod"))
    monkeypatch.setattr(Pod, "end_ray", lambda pod: None)
    return Pod()


def until(holds: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Wait until the condition `holds`; fails at the deadline."""
    ends = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def gone_pid() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    return ended.pid


@pytest.mark.parametrize("module", [["deploy.kubernetes.head"], ["deploy.kubernetes.node", "--role", "cpu"]])
def test_a_missing_kuberay_command_is_one_clear_line(tmp_path: Path, module: list[str]) -> None:
    command = [sys.executable, "-m", *module, "--probe-port", str(free_port())]
    environment = {name: value for name, value in os.environ.items() if name != COMMAND} | {VARIABLE: str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    message = ended.stderr.strip().splitlines()[-1]
    assert "KUBERAY_GEN_RAY_START_CMD is not set" in message
    assert "ray.io/overwrite-container-cmd" in message


def test_an_unknown_role_is_rejected() -> None:
    command = [sys.executable, "-m", "deploy.kubernetes.node", "--role", "head"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "'cpu', 'verifier', 'verifier-code', 'rollout', 'learner'" in ended.stderr


def test_the_exit_status_of_ray_is_reported(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "bash -c 'exit 3'")
    pod.start_ray()
    until(lambda: pod.ray_problem() is not None)
    assert pod.ray_problem() == pod.readiness_problem() == "Ray ended with status 3"
    monkeypatch.delenv(COMMAND)
    with pytest.raises(PodError, match="KUBERAY_GEN_RAY_START_CMD is not set"):
        pod.start_ray()


def test_a_failing_probe_answers_with_its_reason() -> None:
    problems: list[str] = []
    probes = Probes({"/readyz": lambda: problems[0] if problems else None}, port=0)
    try:
        url = f"http://127.0.0.1:{probes.port}"
        assert httpx.get(f"{url}/readyz").status_code == 200
        problems.append("rollout of run-1 is joining")
        answer = httpx.get(f"{url}/readyz")
        assert (answer.status_code, answer.text) == (503, "rollout of run-1 is joining\n")
        assert httpx.get(f"{url}/metrics").status_code == 404
    finally:
        probes.close()


def test_a_dead_process_is_removed_from_the_registry(tmp_path: Path) -> None:
    registry = PodRegistry(tmp_path)
    (tmp_path / f"{gone_pid()}.json").write_text(json.dumps({"service": "rollout", "run": "r", "state": "joining"}))
    (tmp_path / f"{os.getpid()}.json").write_text(json.dumps({"service": "rollout", "run": "r", "state": "ready"}))
    assert registry.processes() == [PodProcess(os.getpid(), "rollout", "r", "ready")]
    registry.withdraw()
    registry.withdraw()
    assert registry.processes() == []


async def test_a_hosted_service_is_registered_and_drains(
    pod: Pod, redis: object, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/model")))
    given: list[Context] = []

    class Echo(EchoService):
        async def run(self, context: Context) -> None:
            given.append(context)
            await super().run(context)

    hosted = HostedService(lambda: Echo("verifier"), run_id, redis_url)
    await asyncio.to_thread(until, lambda: bool(pod.registry.processes()) and pod.readiness_problem() is None)
    assert pod.registry.processes() == [PodProcess(os.getpid(), "verifier", run_id, "ready")]
    await asyncio.to_thread(pod.drain)
    assert (hosted.done, hosted.fault(), pod.registry.processes()) == (True, None, [])
    assert pod.readiness_problem() == "the pod is ending"
    assert [context.grace_s() for context in given] == [POD_DRAIN_S], "it knows how long it has"


def test_a_service_that_does_not_drain_does_not_block_the_pod(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pods, "POD_DRAIN_S", 0.3)
    file = Path(os.environ[VARIABLE]) / f"{os.getpid()}.json"
    file.write_text(json.dumps({"service": "rollout", "run": "r", "state": "ready"}))
    pod.drain()
    assert f"did not drain within 0.3 s: rollout of r (pid {os.getpid()}) is ready" in caplog.text
    assert pod.registry.draining


def test_a_pod_ends_when_it_only_holds_avoided_places(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = tmp_path / "termination-log"
    shown.touch()
    monkeypatch.setattr(node_facts, "TERMINATION", shown)
    worker = node.Worker("rollout", 0)
    monkeypatch.setattr(node.Worker, "_join", lambda worker, ray: None)
    monkeypatch.setattr(Pod, "start_ray", lambda pod, **_: psutil.Process())
    monkeypatch.setattr(node, "WATCH_S", 0.02)
    registry = pod.registry
    reason = "rollout avoids node n until 10:00 UTC (3 failed there: died)"
    registry.request_end(reason)
    states = Path(os.environ[VARIABLE]) / f"{os.getpid()}.json"

    def announce(state: str) -> None:
        states.write_text(json.dumps({"service": "rollout", "run": "r", "state": state}))

    announce("ready")
    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(worker.run)
        assert registry.end_reason() is None, "another replica works in the pod"
        announce("avoided")
        until(lambda: registry.draining)
        states.unlink()
        assert status.result(20) == 1
    assert shown.read_text() == reason
    assert f"this pod ends, and is replaced: {reason}" in caplog.text


def test_a_request_to_end_holds_while_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = PodRegistry(tmp_path)
    killed = "import os; from deploy.hosting.pod_registry import *; PodRegistry.current().request_end('r'); os._exit(9)"
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", killed], timeout=60, check=False)
    assert ended.returncode == 9
    assert list(tmp_path.iterdir()) != []
    assert registry.end_reason() is None, "the pod is empty, between two runs"
    assert list(tmp_path.iterdir()) == []
    assert "the process that asked to end this pod has died: r" in caplog.text

    registry.request_end("again")
    [own] = tmp_path.iterdir()
    other = own.with_name(own.name.replace(str(os.getpid()), str(os.getppid())))
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    living = {"started": started, "reason": "another"}
    other.write_text(json.dumps(living | {"started": str(int(started) - 1)}))
    assert registry.end_reason() == "again"
    assert list(tmp_path.iterdir()) == [own], "another process has the id of the one that died"
    other.write_text(json.dumps(living))
    registry.withdraw()
    assert registry.end_reason() == "another", "each process withdraws its own request"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 3", 3, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(2)", 2, ""),
        ("raise RuntimeError('Ray is lost')", 1, "RuntimeError: Ray is lost"),
    ],
)
def test_the_first_process_leaves_without_a_teardown(body: str, status: int, said: str) -> None:
    """Native threads of Ray's client may crash in one, whichever way the process ends."""
    program = (
        "import atexit; from deploy.kubernetes.pod import run_and_leave\n"
        "atexit.register(print, 'torn down')\n"
        f"def main():\n    print('works'); {body}\n"
        "run_and_leave(main)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (status, "works\n")
    assert said in ended.stderr


class Store:
    """A control store and its Redis, as `StoreWatch` asks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault: Exception | None = None
        self.server: str | None = "a"
        self.reads = self.asked = 0
        self.answers, self.says = threading.Event(), threading.Event()
        self.answers.set()
        self.says.set()
        for name in ("READ_EVERY_S", "LOST_S"):
            monkeypatch.setattr(ray_node, name, 0.02 if name == "READ_EVERY_S" else 1.0)
        monkeypatch.setattr(ray_node, "store_reader", lambda gcs: self.read)

    def read(self, timeout_s: float) -> None:
        self.reads += 1
        assert self.answers.wait(60)
        if self.fault:
            raise self.fault

    def server_id(self) -> str | None:
        self.asked += 1
        assert self.says.wait(60)
        return self.server

    def watched(self, first: str | None = None) -> StoreWatch:
        return StoreWatch(Node("n", "h:1"), self.server_id, first)

    def until_asked(self) -> None:
        asked = self.asked
        until(lambda: self.asked > asked + 1)


def test_a_store_that_reads_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    watch = store.watched()
    until(lambda: store.reads > 1)
    until(lambda: watch.problem is None)
    store.fault = RpcError("timed out")
    until(lambda: str(watch.problem).startswith("Ray's control store has read nothing from Redis for"))
    store.fault = None
    until(lambda: watch.problem is None)
    store.answers.clear()  # the watch hangs
    until(lambda: watch.problem is not None)
    store.answers.set()
    until(lambda: watch.problem is None)
    watch.close()


def test_a_store_of_another_server_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    watch = store.watched()
    for server in (None, "a"):
        store.server = server
        store.until_asked()
        assert watch._other_since is None
    store.server = "b"
    until(lambda: str(watch.problem).startswith("Redis is another server"))
    store.server = None  # it does not answer
    until(lambda: watch.problem is None)
    watch.close()


def test_a_server_that_was_replaced_before_the_watch_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    watch = store.watched(first="before")
    until(lambda: str(watch.problem).startswith("Redis is another server"))
    watch.close()


def test_a_server_that_says_nothing_for_long_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when no name is resolved: the control store's own connection lasts."""
    store = Store(monkeypatch)
    store.says.clear()
    watch = store.watched(first="a")
    started = time.monotonic()
    until(lambda: store.asked == 1 and time.monotonic() > started + 2 * ray_node.LOST_S)
    until(lambda: watch.problem is None)
    store.says.set()
    store.until_asked()
    assert watch._other_since is None
    watch.close()


URLS: dict[str, tuple[str, dict[str, str], str]] = {
    "without-ray's": ("redis://a:6379/0", {}, "redis://a:6379/0"),
    "another": ("redis://a:6379/0", {RAY_ADDRESS: "redis://b:1"}, "redis://b:1"),
    "without-scheme": (
        "redis://a:6379/0",
        {RAY_ADDRESS: "b:1", RAY_USER: "ray", RAY_PASSWORD: "p/@:w"},
        "redis://ray:p%2F%40%3Aw@b:1",
    ),
    "without-user": ("rediss://a/0", {RAY_ADDRESS: "rediss://b:1", RAY_PASSWORD: "pw"}, "rediss://:pw@b:1"),
    "sentinels": ("redis+sentinel://s:26379/m/0", {RAY_ADDRESS: "redis://s:26379"}, "redis+sentinel://s:26379/m/0"),
}


@pytest.mark.parametrize("case", URLS)
def test_the_server_of_rays_state_is_asked(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ray's own address and login, which may be those of another Redis than the platform's."""
    platform, variables, asked = URLS[case]
    for variable in (RAY_ADDRESS, RAY_USER, RAY_PASSWORD):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert control_store_url(platform) == asked
    if password := variables.get(RAY_PASSWORD):
        assert parse_redis_url(asked).password == password


@each("url", ["", "http://a:1/0"])
def test_an_address_that_is_not_valid_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_ADDRESS, "redis://b:1")
    with pytest.raises(ValueError, match="PENSTOCK_REDIS"):
        control_store_url(url)


def test_a_head_with_such_an_address_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "deploy.kubernetes.head", "--redis", "http://a:1/0"]
    environment = os.environ | {RAY_ADDRESS: "redis://b:1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "PENSTOCK_REDIS" in line


def test_the_server_is_asked_before_ray_starts(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it said is what the watch compares with."""
    steps: list[str | None] = []

    async def server_id(url: str, deadline_s: float) -> str:
        steps.append(url)
        return "a"

    def start_ray(self: Pod) -> psutil.Process:
        steps.append("ray")
        return psutil.Process()

    def watch(node: Node, server: Callable[[], str | None], first: str | None) -> StoreWatch:
        steps.append(first)
        steps.append(server())
        raise PodError("seen")

    monkeypatch.setattr(Pod, "start_ray", start_ray)
    monkeypatch.setattr(Pod, "end_ray", lambda pod: steps.append("end"))
    replaced = {"server_id": server_id, "started_node": lambda ray: Node("n", "h:1"), "joined": lambda node: True}
    for name, value in {**replaced, "StoreWatch": watch}.items():
        monkeypatch.setattr(head, name, value)
    monkeypatch.setenv(RAY_ADDRESS, "redis://b:1")
    monkeypatch.delenv(RAY_PASSWORD, raising=False)
    with pytest.raises(PodError, match="seen"):
        head.Head("redis://a:6379/0", free_port()).run()
    assert steps == ["redis://b:1", "ray", "a", "redis://b:1", "a", "end"]
