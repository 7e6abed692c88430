"""Owns the tests of how a laptop's Ray node starts on a slow machine, and what is reported when it does not start.

Must not depend on how slow this machine is: the slow part of the node sleeps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from deploy.hosting.environment import head_environment
from deploy.local.ports import TRIES, NoFreePortError, free_ports

ROOT = Path(__file__).resolve().parents[2]
SLEEPS = """
import sys, time
if any(argument.endswith("dashboard/agent.py") for argument in sys.orig_argv):
    time.sleep(20)  # the raylet waits 15 s for an agent that has to choose its port
"""
STARTS = """
import sys
from pathlib import Path
from deploy.hosting.session import start_ray, stop_ray
from deploy.local.ports import free_ports

start_ray(Path(sys.argv[1]), 1, free_ports)
print("started")
stop_ray()
"""

# Ray, which hosting imports, emits its own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_whose_agent_needs_20_seconds_starts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLEEPS)
    environment = head_environment("127.0.0.1", str(tmp_path)) | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    folder = tempfile.mkdtemp(prefix="penstock-", dir="/tmp")
    try:
        command = [sys.executable, "-c", STARTS, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert (done.returncode, "started" in done.stdout) == (0, True), done.stderr[-3000:]


@contextmanager
def raylet(folder: Path) -> Iterator[None]:
    """A child process with the raylet's name that never registers."""
    shutil.copy(shutil.which("sleep") or "/bin/sleep", folder / "raylet")
    process = subprocess.Popen([str(folder / "raylet"), "60"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray's module of services; it finds no node."""
    from ray._private import services

    def get_node(gcs: str, node: str) -> None:
        raise RuntimeError(f"{gcs} does not know {node}")

    monkeypatch.setattr(services, "get_node", get_node)
    return services


def test_a_node_that_died_is_reported_at_once(unregistered: Any) -> None:
    from deploy.hosting.ray_internals import NodeStartError, patient_start

    with patient_start(3600.0, free_ports), pytest.raises(NodeStartError, match="died while it started"):
        unregistered.get_node("127.0.0.1:1", "a1")


def test_a_node_that_never_registers_is_reported_in_time(unregistered: Any, tmp_path: Path) -> None:
    from deploy.hosting.ray_internals import NodeStartError, patient_start

    with (
        raylet(tmp_path),
        patient_start(1.0, free_ports),
        pytest.raises(NodeStartError, match="has not registered in time"),
    ):
        unregistered.get_node("127.0.0.1:1", "a1")


def test_ray_is_as_before_after_a_start_that_failed(unregistered: Any) -> None:
    from ray._private import parameter

    from deploy.hosting.ray_internals import patient_start

    before = (unregistered.get_node, unregistered.start_ray_process, parameter.RayParams)
    with suppress(KeyboardInterrupt), patient_start(1.0, free_ports):
        inside = (unregistered.get_node, unregistered.start_ray_process, parameter.RayParams)
        raise KeyboardInterrupt
    assert not set(inside) & set(before)
    assert (unregistered.get_node, unregistered.start_ray_process, parameter.RayParams) == before


def test_no_port_is_given_twice() -> None:
    assert len(set(free_ports(40))) == 40
    with pytest.raises(NoFreePortError, match="no free port in 20000-31999"):
        free_ports(TRIES + 1)
