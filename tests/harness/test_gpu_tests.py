"""tests/gpu is collected where only torch, DeepSpeed and their like are installed, and says what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import last_line
from tests.gpu.needs import GIB, REHEARSAL, Machine, shortages
from tests.harness.selected_packages import link

ROOT = Path(__file__).parents[2]
ENOUGH = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "numpy", "pydantic", "pyarrow", "pytest")
DEVICE = Machine(1, 80 * GIB, "")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is enough, and what that requires."""
    return link(tmp_path_factory.mktemp("packages"), ENOUGH)


def python(packages: Path, *arguments: str, rehearse: bool = False) -> subprocess.CompletedProcess[str]:
    paths = f"{ROOT}:{packages}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", REHEARSAL: str(int(rehearse))}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)


def test_nothing_else_is_needed_to_collect_them(packages: Path) -> None:
    """Nor to skip them: with status 0, the reasons, and a last line that says that nothing ran."""
    finished = python(packages, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    if Machine.found().devices:
        return
    assert "not run: needs 1 CUDA device, found 0 (torch" in finished.stdout
    assert "needs 2 CUDA devices" in finished.stdout
    assert finished.stdout.splitlines()[-1].startswith("tests on GPUs: NOTHING RAN: all ")


@pytest.mark.slow
def test_the_benchmark_needs_nothing_else(packages: Path) -> None:
    finished = python(packages, "-m", "benchmarks.learner.gpu", "--help")
    assert finished.returncode == 0, finished.stderr
    absent = python(packages, "-c", "import redis")
    assert "No module named 'redis'" in absent.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_they_run_on_the_cpu_as_a_rehearsal(packages: Path) -> None:
    finished = python(packages, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", rehearse=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "REHEARSED on the CPU" in finished.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("machine", "wanted", "texts"),
    [
        (DEVICE, (1, 16, False, ()), []),
        (DEVICE, (2, 16, False, ()), ["2 CUDA devices, found 1"]),
        (DEVICE, (1, 96, False, ()), ["96 GiB on each device, found 80.0"]),
        (DEVICE, (1, 16, False, ("no_such_package",)), ["the package no_such_package, which is not installed"]),
        (Machine(0, 0, "no driver"), (1, 16, False, ()), ["1 CUDA device, found 0 (no driver)"]),
    ],
)
def test_what_a_test_lacks_is_named(
    machine: Machine, wanted: tuple[int, float, bool, tuple[str, ...]], texts: list[str]
) -> None:
    assert shortages(machine, *wanted) == texts


def test_the_last_line_says_whether_anything_ran() -> None:
    assert last_line(0, 9, rehearsal=False).startswith("tests on GPUs: NOTHING RAN: all 9 need")
    assert last_line(3, 9, rehearsal=False).startswith("tests on GPUs: 3 ran, 9 did not")
    assert "shows nothing about GPUs" in last_line(3, 0, rehearsal=True)
