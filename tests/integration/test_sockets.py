"""What a laptop's stack listens on while a run trains: loopback alone, and nothing without its password or token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.harness.stack import Stack
from tests.integration.runs import document

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
PARTS = (
    "valkey-server",
    "gcs_server",
    "raylet",
    "DashboardAgent",
    "RuntimeEnvAgent",
    "ServeController",
    "Gateway",
    "RoleActor",
    "ServeReplica",
    "VLLM::EngineCore",
)
"""Parts of which at least one socket must have been seen: a test that looks at nothing would pass."""
NODES = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
"""


@pytest.fixture(scope="module")
def closed_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with its own Redis, started by a shell that names another Redis, another Ray and another interface."""
    elsewhere = {
        "PENSTOCK_REDIS_USERNAME": "of-another-redis",
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "of-another-ray",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "eth7",
    }
    with Stack(tmp_path_factory.mktemp("closed"), environment=elsewhere) as stack:
        yield stack
    assert stack.left == [], stack.output


class Sockets:
    """The sockets on which the processes of a stack have listened so far: (host, port) with the process's title."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.found: dict[tuple[str, int], str] = {}

    def look(self) -> None:
        """Add what the processes listen on now."""
        for process in [psutil.Process(self._stack.process.pid), *self._stack.below()]:
            try:
                title = " ".join([process.name(), *process.cmdline()])
                sockets = process.net_connections("inet")
            except psutil.Error:
                continue  # it has just ended
            for one in sockets:
                # A datagram socket has no state; one that is connected accepts nothing from others.
                if one.status == psutil.CONN_LISTEN or (one.status == psutil.CONN_NONE and one.laddr and not one.raddr):
                    self.found[tuple(one.laddr)] = title

    @property
    def open(self) -> dict[tuple[str, int], str]:
        """Those that other machines reach."""
        return {place: title for place, title in self.found.items() if place[0] not in LOOPBACK}


def variables_of(stack: Stack, name: str) -> tuple[dict[str, str], list[str]]:
    """The environment and the command line of the stack's process with this name."""
    [process] = [process for process in stack.below() if process.name() == name]
    return process.environ(), process.cmdline()


def nodes(gcs: str, authentication: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    """Ask Ray's control store for its nodes."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = others | {"HOME": str(home)} | authentication
    command = [sys.executable, "-c", NODES, gcs]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.timeout(900)
def test_a_run_listens_on_loopback_alone(closed_stack: Stack, tiny_model: Path, questions: Path) -> None:
    sockets = Sockets(closed_stack)
    recipe = document(tiny_model, questions, max_staleness=1, steps=50)
    recipe["learner"].update(ranks=2, zero_stage=2)
    run = closed_stack.submit(recipe)

    def two_versions(view: dict[str, Any]) -> bool:
        sockets.look()
        return (view["policy_version"] or 0) >= 2

    closed_stack.until(run, two_versions, "two published versions", deadline_s=500)
    sockets.look()
    for (host, port), title in sorted(sockets.found.items(), key=lambda found: found[1]):
        print(f"{host}:{port} {title[:60]}")
    assert sockets.open == {}
    missing = [part for part in PARTS if not any(part in title for title in sockets.found.values())]
    assert missing == [], sorted(set(sockets.found.values()))
    check_secrets(closed_stack)
    closed_stack.cancel_all()


def check_secrets(stack: Stack) -> None:
    """No process shows the password or the token as an argument, and no file has it but its own."""
    environment, _ = variables_of(stack, "raylet")
    token_file = Path(environment["RAY_AUTH_TOKEN_PATH"])
    own = {stack.redis_password, token_file}
    secrets = [file.read_text() for file in own]
    assert all(
        len(secret) == 64 and file.stat().st_mode & 0o777 == 0o600 for secret, file in zip(secrets, own, strict=True)
    )
    arguments = " ".join(" ".join(process.cmdline()) for process in stack.below())
    assert not any(secret in arguments for secret in secrets)
    files = [file for folder in (stack.folder, token_file.parent) for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert {file for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)} == own


def test_redis_answers_only_to_its_password(closed_stack: Stack) -> None:
    shown = re.search(r"redis://[^, ]+", closed_stack.output)
    assert shown
    assert "@" not in shown[0]
    with redis.Redis.from_url(shown[0]) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis.from_url(closed_stack.redis_url) as known:
        assert known.ping()


@pytest.mark.timeout(600)
def test_ray_answers_only_to_its_token(closed_stack: Stack, tmp_path: Path) -> None:
    environment, arguments = variables_of(closed_stack, "raylet")
    [gcs] = [argument.partition("=")[2] for argument in arguments if argument.startswith("--gcs-address=")]
    assert gcs.startswith("127.0.0.1:")
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in environment
    token = {name: environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    answered = nodes(gcs, token, tmp_path)
    assert answered.stdout.strip() == "1", answered.stderr
    for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        refused = nodes(gcs, wrong, tmp_path)
        assert refused.returncode, refused.stdout
        assert "AuthenticationError" in refused.stderr
