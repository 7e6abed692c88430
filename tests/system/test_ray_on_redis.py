"""Ray's head on an external Redis, as user ray of the chart's start script: a killed head restarts with its actors."""

import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.harness.programs import demanded
from tests.harness.servers.redis_servers import PASSWORDS, scripted_server
from tests.system.certificates import make_certificates

pytestmark = pytest.mark.system

RAY = Path(sys.executable).parent / "ray"
FOREIGN = ("RAY_", "PENSTOCK_", "PYTHONDONT")
"""Variables of this process that the Ray under test must not inherit."""
NAMESPACE = "default_penstock"
START_S = 120
STARTS = 4
MARK = "PENSTOCK_TEST_RAY"
DRIVER = """
import json, os, sys, ray
ray.init(address=sys.argv[1], namespace="test", log_to_driver=False, configure_logging=False)

class Keeper:
    def pid(self):
        return os.getpid()

if sys.argv[2] == "new":
    options = dict(name="keeper", lifetime="detached", max_restarts=-1, num_cpus=0)
    keeper = ray.remote(Keeper).options(**options).remote()
else:
    keeper = ray.get_actor("keeper")
pid = ray.get(keeper.pid.remote(), timeout=60)
print(json.dumps({"pid": pid, "cluster": ray.get_runtime_context().gcs_address}))
"""


class Head:
    """`ray start --head` on its own ports, in a folder with a short path, which Ray's sockets need."""

    def __init__(self, redis_address, extra):
        self.folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        self.base = random.randrange(21000, 31000, 100)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": redis_address,
            "RAY_external_storage_namespace": NAMESPACE,
            MARK: str(self.folder),
            **extra,
        }

    def start(self):
        names = (
            "port",
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
            "ray-client-server-port",
        )
        command = [
            RAY,
            "start",
            "--head",
            "--redis-username=ray",
            f"--redis-password={PASSWORDS['ray']}",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=1",
            "--include-dashboard=false",
            "--no-monitor",
            "--include-log-monitor=false",
            f"--temp-dir={self.folder}",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
            *(f"--{name}={self.base + number}" for number, name in enumerate(names)),
            f"--min-worker-port={self.base + 20}",
            f"--max-worker-port={self.base + 99}",
        ]
        # Ray gives its agents 15 s, which a busy machine may exceed; a pod would be restarted as well.
        for _ in range(STARTS):
            with (self.folder / "start.log").open("w") as output:
                done = subprocess.run(
                    command, env=self.environment, stdout=output, stderr=output, timeout=START_S, check=False
                )
            if done.returncode == 0:
                return
            self.kill()
        raise AssertionError((self.folder / "start.log").read_text()[-3000:])

    def drive(self, what):
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, f"127.0.0.1:{self.base}", what],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def processes(self):
        """All processes with our variable, and their descendants: Ray's agents overwrite their own variables."""
        found = set()
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder):
                    found |= {process, *process.children(recursive=True)}
            except psutil.Error:
                continue
        return found

    def kill(self):
        """`kill -9` all processes of the head, as if its pod was lost."""
        while found := self.processes():
            for process in found:
                process.kill()
            psutil.wait_procs(found, timeout=5)
            time.sleep(0.1)


@pytest.fixture(params=["plain", "tls"])
def served(request, open_path):
    """The embedded server, or the operating system's server with TLS."""
    extra = {}
    if request.param == "tls":
        binary = demanded("redis-server")
        (open_path / "bin").mkdir()
        (open_path / "bin/valkey-server").symlink_to(binary)
        authority = make_certificates(open_path / "tls")
        extra = {"RAY_REDIS_CA_CERT": str(authority)}
    with scripted_server(open_path, REDIS_RAY_NAMESPACE=NAMESPACE) as server:
        scheme = "rediss" if request.param == "tls" else "redis"
        yield server, f"{scheme}://127.0.0.1:{server.port}", extra


@pytest.mark.timeout(900)
def test_a_killed_head_restarts_with_its_actors(served, open_path):
    server, address, extra = served
    tls = {"ssl": True, "ssl_cert_reqs": "none"} if address.startswith("rediss") else {}
    mine = server.client(username="ray", password=PASSWORDS["ray"], **tls)
    head = Head(address, extra)
    try:
        head.start()
        first = head.drive("new")
        assert psutil.pid_exists(first["pid"])
        head.kill()
        assert not psutil.pid_exists(first["pid"])
        head.start()
        again = head.drive("old")
        assert again["pid"] != first["pid"]
        names = {key for key in mine.scan_iter() if key.startswith("RAY")}
        assert names
        assert all(name.startswith(f"RAY{NAMESPACE}@") for name in names)
    finally:
        head.kill()
        logs = [file for file in head.folder.glob("session_2*/logs/**/*.*") if file.is_file()]
        output = "".join(file.read_text(errors="replace") for file in logs)
        shutil.rmtree(head.folder, ignore_errors=True)
    assert PASSWORDS["ray"] not in output
    assert "NOPERM" not in output
    # KubeRay runs this when a cluster is deleted.
    clean = (
        "from ray._private.gcs_utils import cleanup_redis_storage as clean; import os; "
        f"assert clean('127.0.0.1', {server.port}, os.environ['PASSWORD'], {bool(tls)}, '{NAMESPACE}', username='ray')"
    )
    environment = {**head.environment, "PASSWORD": PASSWORDS["ray"]}
    subprocess.run([sys.executable, "-c", clean], env=environment, timeout=60, check=True)
    assert [key for key in mine.scan_iter() if key.startswith("RAY")] == []
