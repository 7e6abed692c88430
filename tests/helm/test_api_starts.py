"""Tests that the API's rendered command, with its rendered variables, answers its rendered probes.

Must not need a cluster: files that a pod would mount are written to a folder, and Redis is an embedded server.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.free_ports import free_port
from tests.harness.servers.redis_servers import embedded_server
from tests.helm.cases import CPU
from tests.helm.rendering import FULLNAME, ROOT, Container, Document, PodTemplate, render

READY_S = 60.0
PASSWORD = "a-password-of-this-test"


def environment(pod: PodTemplate, folder: Path, redis: str) -> dict[str, str]:
    """The container's variables, with the mounted files that they name written below `folder`."""
    found = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PENSTOCK_HOST": "127.0.0.1"}
    for name, entry in pod.main.env.items():
        value = str(entry.get("value", ""))
        if value.startswith("/etc/penstock/"):
            path = folder / value.removeprefix("/etc/penstock/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(mounted(pod, value), encoding="utf-8")
            value = str(path)
        if "value" in entry:
            found[name] = value
    return {**found, "PENSTOCK_REDIS": redis, "HOME": str(folder)}


def mounted(pod: PodTemplate, path: str) -> str:
    """The content of a pod's file: the ConfigMap's text, the access file, or a password."""
    folder, _, key = path.rpartition("/")
    if key == "access.yaml":
        return secret(key)
    volume: Document = pod.volumes[pod.main.mounts[folder]["name"]]
    if "configMap" not in volume:
        return PASSWORD
    return str(render(CPU).one("ConfigMap", name=volume["configMap"]["name"]).at("data", key))


def secret(key: str) -> str:
    """A value of the rendered Secret with the access file and the tokens."""
    return base64.b64decode(render(CPU).one("Secret", name=f"{FULLNAME}-access").at("data", key)).decode()


@contextmanager
def started(container: Container, variables: dict[str, str], port: int, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the container's command as a process, on another port."""
    line = [
        {"python": sys.executable, "8470": str(port), "0.0.0.0": "127.0.0.1"}.get(word, word)
        for word in container.command
    ]
    process = subprocess.Popen(
        line, env=variables, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=60)
            raise


def until_ready(process: subprocess.Popen[str], address: str) -> None:
    """Repeat a request as the kubelet does, until the deadline."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        try:
            if httpx.get(address, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"{address} was not ready within {READY_S} s")


async def test_the_api_pod_answers_its_probes_and_prometheus(tmp_path: Path) -> None:
    pod, port = render(CPU).pod("api"), free_port()
    probes: dict[str, Any] = {
        kind: pod.main.document[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe")
    }
    with embedded_server() as server:
        await let_in(server.port, pod.main.env["PENSTOCK_REDIS_USERNAME"]["value"])
        variables = environment(pod, tmp_path, f"redis://127.0.0.1:{server.port}/0")
        with started(pod.main, variables, port, tmp_path) as process:
            until_ready(process, f"http://127.0.0.1:{port}{pod.main.document['readinessProbe']['httpGet']['path']}")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                for path in (*probes.values(), "/metrics"):
                    assert (await client.get(path)).status_code == 200, path
                for key, role in (("admin-token", "admin"), ("test-token", "operator"), ("prometheus-token", "viewer")):
                    found = await client.get("/v1/whoami", headers={"authorization": f"Bearer {secret(key)}"})
                    assert found.json()["roles"] == {"*": role}, found.text
                targets = "/v1/prometheus/targets"
                scraper = {"authorization": f"Bearer {secret('prometheus-token')}"}
                assert (await client.get(targets)).status_code == 401
                assert (await client.get(targets, headers=scraper)).status_code == 200
                for host, status in ((f"{FULLNAME}-api.training.svc:8470", 200), ("attacker.example", 421)):
                    assert (await client.get(targets, headers=scraper | {"host": host})).status_code == status


async def let_in(port: int, user: str) -> None:
    """Create the release's user on the embedded server, and disable every other user."""
    from services.streams.connection.client import connect

    client = await connect(f"redis://127.0.0.1:{port}/0")
    await client.execute_command("ACL", "SETUSER", user, "on", f">{PASSWORD}", "~penstock:*", "&*", "+@all")
    await client.execute_command("ACL", "SETUSER", "default", "off")
    await client.aclose()
