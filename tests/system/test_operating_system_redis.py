"""The stream, pipeline and whole-run tests again, against the operating system's redis-server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.programs import demanded
from tests.harness.servers.redis_servers import scripted_server, start_server

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
ALL = "not system and not images and not gpu"
"""Includes the tests marked slow, such as most whole runs."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ALL]
STREAMS = [
    "tests/services/streams/test_streams.py",
    "tests/services/sampler/test_pipeline.py",
    "tests/services/api/test_api.py",
]


@pytest.fixture(scope="module")
def system_redis(tmp_path_factory):
    binary = demanded("redis-server")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.(\d+)", version)
    assert found, version
    assert (int(found[1]), int(found[2])) >= (7, 0), version
    with start_server(tmp_path_factory.mktemp("redis"), binary=binary) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.mark.timeout(1200)
def test_a_whole_run_as_user_penstock(open_path):
    """The platform logs in with the chart's user; the tests use `default`, which the chart's server does not have."""
    with scripted_server(open_path):
        users = (open_path / "users.acl").read_text().replace("default off", "default on nopass ~* &* +@all")
    (open_path / "users.acl").write_text(users)
    command = [*PYTEST, "tests/integration/test_run.py"]
    binary = demanded("redis-server")
    with start_server(open_path, "--aclfile", open_path / "users.acl", binary=binary) as server:
        environment = {
            **os.environ,
            "PENSTOCK_TEST_REDIS": f"redis://127.0.0.1:{server.port}/0",
            "PENSTOCK_REDIS_USERNAME": "penstock",
            "PENSTOCK_REDIS_PASSWORD_FILE": str(open_path / "secret/penstock-password"),
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1180, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:]
        refused = server.client().execute_command("ACL LOG")
        assert refused == []
        assert server.client().info("commandstats")["cmdstat_auth"]["calls"] > 5, "no client logged in"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("tests", [STREAMS, ["tests/integration"]], ids=["streams", "whole-run"])
def test_the_suite_passes_on_it(system_redis, tests):
    environment = {**os.environ, "PENSTOCK_TEST_REDIS": system_redis}
    done = subprocess.run(
        [*PYTEST, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2380, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-500:]
