"""Owns the tests of the client's own distribution: its wheel, alone in an environment.

Must not import the package from the checkout: commands run in another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_client.cli.recipe import read_recipe
from penstock_client.cli.table import client_commands
from tests.harness.small_run import recipe_document
from tests.penstock_client.gateways import ROOT, LateGateway, running_gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UV = Path(sys.executable).with_name("uv")
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "redis", "fastapi", "numpy", "services", "deploy")


def run(folder: Path, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, where nothing of the checkout can be imported."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(folder, UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT / "penstock_client")
    assert built.returncode == 0, built.stderr
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the client's wheel and what it needs."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    for command in (
        ("venv", "--quiet", "--python", sys.executable, folder),
        ("pip", "install", "--quiet", "--python", folder / "bin" / "python", wheel),
    ):
        done = run(folder.parent, UV, *command)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LateGateway]:
    """A gateway whose token the client finds."""
    with running_gateway(redis_url, tmp_path_factory.mktemp("state")) as gateway:
        yield gateway


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"penstock_client", "penstock_client-0.1.0.dist-info"}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "penstock_client").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == files
    assert "penstock_client/py.typed" in names


def test_the_command_works_without_the_platform(
    environment: Path, gateway: LateGateway, tmp_path: Path, run_id: str
) -> None:
    command = environment / "bin" / "penstock"
    assert run(tmp_path, command, "--version").stdout == "penstock-client 0.1.0\n"
    shown = run(tmp_path, command, "--help").stdout
    for name in (command.name for command in client_commands(read_recipe)):
        assert f" {name} " in shown
    (tmp_path / "recipe.json").write_text(json.dumps(recipe_document("/model")))
    done = run(tmp_path, command, "submit", "recipe.json", "--id", run_id, PENSTOCK_API=gateway.url)
    assert (done.returncode, done.stdout) == (0, f"{run_id}\n"), done.stderr
    listed = run(tmp_path, command, "runs", "--name", run_id, PENSTOCK_API=gateway.url).stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["run", "state"], [run_id, "queued"]]
    absent = run(tmp_path, command, "demo")
    assert (absent.returncode, "needs the full installation" in absent.stderr) == (2, True)


def test_the_library_needs_httpx_and_pydantic_alone(environment: Path, gateway: LateGateway, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    code = (
        "import sys\nfrom penstock_client.client import Client\n"
        f"print(len(list(Client({gateway.url!r}).runs())) >= 0)\n"
        "print(sorted({'typer', 'rich', 'yaml', 'click'} & set(sys.modules)))\n"
        f"import importlib.util\nprint([name for name in {HEAVY!r} if importlib.util.find_spec(name)])"
    )
    done = run(tmp_path, python, "-c", code)
    assert (done.returncode, done.stdout) == (0, "True\n[]\n[]\n"), done.stderr
