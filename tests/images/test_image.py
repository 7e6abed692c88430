"""The CPU image, started as the platform starts it: read-only, without capabilities, as uid 10001.

PENSTOCK_TEST_IMAGE: the image; PENSTOCK_TEST_ENGINE: the engine with its options; PENSTOCK_TEST_RUN: options of `run`.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml

from deploy.local.valkey import EmbeddedValkey
from tests.harness.free_ports import free_port

pytestmark = pytest.mark.images

ROOT = Path(__file__).parents[2]
ENGINE = shlex.split(os.environ.get("PENSTOCK_TEST_ENGINE", "podman"))
SAFE = [
    "--read-only",
    "--tmpfs",
    "/tmp:exec,mode=1777",
    "--cap-drop",
    "all",
    "--security-opt",
    "no-new-privileges",
    "--network",
    "host",
    *shlex.split(os.environ.get("PENSTOCK_TEST_RUN", "")),
]
READY_S = 60.0
DEBIAN_RIGHTS = {
    "chage",
    "chfn",
    "chsh",
    "expiry",
    "gpasswd",
    "mount",
    "newgrp",
    "passwd",
    "su",
    "umount",
    "unix_chkpwd",
}


@pytest.fixture(scope="module")
def image():
    name = os.environ.get("PENSTOCK_TEST_IMAGE", "")
    assert name, "PENSTOCK_TEST_IMAGE is not set: `make test-images` names the image"
    assert shutil.which(ENGINE[0]), f"{ENGINE[0]} is missing: install it (Debian: podman)"
    found = subprocess.run([*ENGINE, "image", "inspect", name], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, f"{name} does not exist: `make image-cpu` builds it"
    return name


@pytest.fixture(scope="module")
def described(image):
    shown = subprocess.run([*ENGINE, "image", "inspect", image], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(shown.stdout)[0]


def started(image, *command, options=(), timeout_s=120.0):
    """Run a container; returns its output and exit status."""
    name = f"penstock-test-{uuid.uuid4().hex[:8]}"
    run = [*ENGINE, "run", "--rm", "--name", name, *SAFE, *options, image, *command]
    try:
        return subprocess.run(run, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        subprocess.run([*ENGINE, "kill", name], capture_output=True, timeout=60, check=False)
        raise


def printed(image, *command, **given):
    """The lines that a container printed; fails if its exit status is not 0."""
    done = started(image, *command, **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


def test_metadata(described):
    config = described["Config"]
    assert config["User"] == "10001:10001"
    assert config["Cmd"] == ["penstock", "--help"]
    assert not config.get("Entrypoint")
    labels = {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]}
    assert {"title", "description", "version", "revision", "base.name"} <= labels
    # No layer's description contains an address from the build.
    history = json.dumps([layer.get("created_by") for layer in described["History"][-9:]])
    assert "://" not in history.replace("https://download.pytorch.org", "")


@pytest.mark.parametrize(
    "command",
    [["penstock", "--help"], ["penstock", "up", "--help"], ["python", "-m", "services.api", "--help"]],
    ids=" ".join,
)
def test_entry_points_answer(image, command):
    assert "usage" in "\n".join(printed(image, *command)).lower()


def test_user_file_system_and_compilers(image):
    script = "id -u; id -g; touch /opt/x 2>/dev/null; echo $?; command -v cc gcc g++ nvcc pip make; pwd; which python"
    lines = printed(image, "sh", "-c", script)
    assert lines == ["10001", "10001", "1", "/opt/penstock", "/opt/venv/bin/python"]


def test_no_file_of_the_image_is_writable_or_gives_rights(image):
    script = (
        "find / -xdev -type f -perm /06000 -print; "
        "find /opt /usr /etc /bin /lib -xdev \\( -writable -o -perm -0002 \\) ! -type l -print | head; "
        "find /opt /usr /etc /bin /lib -xdev -type f | wc -l"
    )
    *found, files = printed(image, "sh", "-c", script, timeout_s=300)
    assert int(files) > 10_000
    # Files of Debian; without capabilities and with no-new-privileges they grant no rights.
    assert {Path(file).name for file in found} <= DEBIAN_RIGHTS


def test_the_byte_code_of_the_image_is_used(image):
    script = "import services.api.app, typer, torch, json; print('loaded')"
    done = started(image, "python", "-v", "-c", script)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr[-3000:]
    compiled = [line for line in done.stderr.splitlines() if "code object from '/" in line and ".pyc" not in line]
    assert compiled == []


def test_bill_of_materials_is_complete(image):
    bill = json.loads("\n".join(printed(image, "cat", "/usr/share/penstock/sbom.cdx.json")))
    listed = {(component["name"], component["version"]) for component in bill["components"]}
    script = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    [listing] = printed(image, "python", "-c", script)
    distributions = {tuple(pair) for pair in json.loads(listing)}
    query = printed(image, "dpkg-query", "-W", "-f", "${Package}\\t${Version}\\n")
    packages = {tuple(line.split("\t")) for line in query}
    assert len(distributions) > 100
    assert len(packages) > 50
    assert distributions - listed == set()
    assert packages - listed == set()


def test_shared_libraries_are_found(image):
    script = (
        "set -e; cd /opt/venv/lib/python3.11/site-packages; export LD_LIBRARY_PATH=$PWD/torch/lib; seen=0; "
        "for f in vllm/*.so ray/_raylet.so pyarrow/*.so; do needs=$(ldd $f); seen=$((seen + 1)); "
        'echo "$needs" | sed -n "/not found/s#^#$f:#p"; done; echo $seen'
    )
    *found, seen = printed(image, "sh", "-c", script)
    assert int(seen) >= 20
    bundled = ("libarrow", "libparquet", "libtvm")
    assert [line for line in found if not any(library in line for library in bundled)] == []


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedValkey(tmp_path / "valkey")
    try:
        yield server.start()
    finally:
        server.stop()
        server.close()


def test_the_api_gets_ready_and_ends_on_sigterm(image, redis):
    port, name = free_port(), f"penstock-test-{uuid.uuid4().hex[:8]}"
    command = ["python", "-m", "services.api", "--redis", redis, "--port", str(port)]
    run = [*ENGINE, "run", "--detach", "--name", name, *SAFE, image, *command]
    try:
        subprocess.run(run, capture_output=True, timeout=120, check=True)
        assert _answer(f"http://127.0.0.1:{port}/readyz") == {"status": "ok"}
        subprocess.run([*ENGINE, "stop", "--time", "20", name], capture_output=True, timeout=60, check=True)
        shown = subprocess.run(
            [*ENGINE, "inspect", "--format", "{{.State.ExitCode}}", name],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert shown.stdout.strip() == "0", "the API must end by itself (137: it was killed)"
    finally:
        subprocess.run([*ENGINE, "rm", "--force", name], capture_output=True, timeout=60, check=False)


def test_a_missing_redis_is_reported_in_the_last_line(image):
    done = started(image, "python", "-m", "services.api", "--redis", "redis://:hidden@127.0.0.1:1/0", timeout_s=180)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("api: ")
    assert "hidden" not in done.stdout + done.stderr


@pytest.mark.timeout(1200)
def test_a_run_from_prompt_to_trained_model(image, redis, open_path):
    """The packaged recipe, two steps long, on the image's engines, within the memory limit of compose."""
    recipe = yaml.safe_load((ROOT / "deploy" / "recipes" / "smollm2-chain-sum.yaml").read_text())
    recipe["limits"]["rollout_steps"] = 2
    recipe["data"]["held_out"] = 8
    (open_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (open_path / "runs").mkdir()
    shutil.chown(open_path / "runs", 10001, 10001)
    options = [
        "--volume",
        f"{open_path}/recipe.yaml:/recipe.yaml:ro",
        "--volume",
        f"{open_path}/runs:/var/lib/penstock",
        "--shm-size",
        "1g",
        "--memory",
        "10g",
    ]
    command = ["penstock", "demo", "--recipe", "/recipe.yaml", "--redis", redis, "--port", str(free_port())]
    printed(image, *command, options=options, timeout_s=1100)
    (exported,) = (open_path / "runs").glob("*/export")
    assert (exported / "config.json").is_file()
    assert list(exported.glob("*.safetensors"))


def _answer(url):
    ends = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return json.load(response)
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < ends, f"{url} does not answer within {READY_S:g} s"
            time.sleep(0.2)
