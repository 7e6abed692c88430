"""Owns the tests of `penstock submit --wait`, which `helm test` and scripts use.

Must not start a stack: the tests end the run through its record.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.settings import parse_recipe
from services.streams.memory_bound import footprint
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.small_run import recipe_document
from tests.penstock_client.gateways import LateGateway, running_gateway

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gateway(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGateway]:
    """A gateway that the test starts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gateway = LateGateway(redis_url, tmp_path)
    yield gateway
    gateway.stop()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe_document("/model")))
    return path


COMMAND = [sys.executable, "-m", "deploy.cli.main"]


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def test_a_warning_goes_to_standard_error(recipe: Path, run_id: str, tmp_path: Path) -> None:
    with embedded_server() as server:
        with redis.Redis(port=server.port) as client:
            client.config_set("maxmemory", int(1.2 * footprint(parse_recipe(recipe_document("/model"))).total))
        with running_gateway(f"redis://127.0.0.1:{server.port}/0", tmp_path) as gateway:
            told = penstock("submit", str(recipe), "--id", run_id, "--api", gateway.url)
    assert (told.returncode, told.stdout) == (0, f"{run_id}\n")
    assert told.stderr.startswith("penstock: warning: the run may need ")
    assert "MiB of Redis, which is more than 70% of its maxmemory" in told.stderr


def read_until(process: subprocess.Popen[str], start: str) -> None:
    """Read output up to a line that starts with `start`; the test's timeout limits the wait."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return
    raise AssertionError(f"ended without {start!r}: {lines}")


@pytest.mark.parametrize(("state", "status"), [pytest.param("succeeded", 0, marks=pytest.mark.slow), ("failed", 1)])
def test_submit_waits_for_an_api_that_starts_late(
    gateway: LateGateway, recipe: Path, redis_url: str, run_id: str, state: str, status: int
) -> None:
    line = [*COMMAND, "submit", str(recipe), "--id", run_id, "--api", gateway.url, "--wait", "--timeout", "200"]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
        try:
            read_until(waiting, "no answer yet: ")
            gateway.start()
            gateway.until(lambda: gateway.knows(run_id), f"{run_id} was not submitted")
            subprocess.run([sys.executable, "-c", END, redis_url, run_id, state], cwd=ROOT, check=True, timeout=60)
            output, _ = waiting.communicate(timeout=90)
        finally:
            waiting.kill()
    assert waiting.returncode == status, output
    assert f"run is {state}: played" in output


END = """
import asyncio, sys
from services.contracts import RunState
from services.streams.connection.client import connect
from services.streams.state.runs import RunRecords

async def end(url, run, state):
    redis = await connect(url)
    await RunRecords(redis).transition(run, RunState(state), "played")
    await redis.aclose()

asyncio.run(end(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_cancelled(gateway: LateGateway, recipe: Path, run_id: str) -> None:
    gateway.start()
    gateway.until_ready()  # the timeout below covers the run only
    done = penstock("submit", str(recipe), "--id", run_id, "--api", gateway.url, "--wait", "--timeout", "12")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"{run_id}: has not ended within 12 s; cancelling")
    assert gateway.get(f"/v1/runs/{run_id}").json()["state"] == "queued"


def test_an_api_that_never_starts_is_one_line(gateway: LateGateway, recipe: Path) -> None:
    done = penstock("submit", str(recipe), "--api", gateway.url, "--wait", "--timeout", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ")
    assert gateway.url in done.stderr


REWARDS = {
    "rewards.py": "from words import WORDS\n\ndef score(*given):\n    return 1.0\n",
    "words.py": "WORDS = ('yes', 'no')\n",
}


def test_a_run_keeps_its_copy_of_the_files(gateway: LateGateway, tmp_path: Path, run_id: str) -> None:
    """Neither an edited file nor a second submission under the same id changes it."""
    data = {"source": "jsonl", "path": "/rows.jsonl", "layout": "fields", "options": {}}
    document = recipe_document(
        "/model", data={**data, "verifier": "python:./rewards.py:score"}, verifier={"files": ["./words.py"]}
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(document))
    for name, text in REWARDS.items():
        (tmp_path / name).write_text(text)
    gateway.start()
    gateway.until_ready()
    done = penstock("submit", str(recipe), "--id", run_id, "--api", gateway.url)
    assert (done.returncode, done.stdout) == (0, f"{run_id}\n"), done.stderr
    digests = {f"./{name}": hashlib.sha256(text.encode()).hexdigest() for name, text in REWARDS.items()}
    (tmp_path / "rewards.py").write_text("def score(*given):\n    return 0.0\n")
    again = penstock("submit", str(recipe), "--id", run_id, "--api", gateway.url)
    assert (again.returncode, "expected an id that is not in use" in again.stderr) == (2, True)
    assert gateway.get(f"/v1/runs/{run_id}").json()["files"] == digests
    shown = json.loads(penstock("show", run_id, "--api", gateway.url).stdout)
    assert shown["files"] == {name: digest[:12] for name, digest in digests.items()}
