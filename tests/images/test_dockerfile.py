"""The Dockerfile as text: pinned base, stages, user, and the files that it names."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = {
    found["name"]: found["body"]
    for found in re.finditer(r"(?ms)^FROM (?P<base>\S+) AS (?P<name>\S+)\n(?P<body>.*?)(?=^FROM |\Z)", TEXT)
}
SCRIPTS = [*sorted((ROOT / "deploy" / "images").glob("*.sh")), ROOT / "deploy" / "compose" / "prepare.sh"]


def test_the_only_external_base_is_pinned_by_digest():
    assert re.search(r"(?m)^ARG BASE=\S+:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", TEXT)
    bases = re.findall(r"(?m)^FROM (\S+) AS", TEXT)
    assert {base for base in bases if base not in STAGES} == {"${BASE}"}
    # A frontend named in a comment would be downloaded as well.
    assert "syntax=" not in TEXT.splitlines()[0]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_each_target_has_the_expected_user_and_paths(target):
    body = STAGES[target]
    assert "USER 10001:10001" in body
    assert "PATH=/opt/venv/bin:" in body
    assert "PENSTOCK_RUNS=/var/lib/penstock" in body
    assert "HOME=/tmp/home" in body
    assert "/usr/share/penstock/sbom.cdx.json" in body
    assert not re.search(r"(?m)^RUN ", body)
    assert {"title", "description", "version", "revision"} <= set(re.findall(r"image\.([a-z]+)=", body))


def test_the_final_stages_contain_no_build_tools():
    sources = {name: set(re.findall(r"COPY --from=(\S+)", STAGES[name])) for name in ("cpu", "gpu")}
    assert sources == {target: {f"environment-{target}", "application", f"sbom-{target}"} for target in ("cpu", "gpu")}
    assert "gcc" not in STAGES["runtime-cpu"]


def test_the_image_without_a_compiler_compiles_nothing():
    assert "TORCH_COMPILE_DISABLE=1" in STAGES["cpu"]
    assert "TORCH_COMPILE_DISABLE" not in STAGES["gpu"]


def test_gpu_stage_finds_its_compiler_below_the_base_python():
    # CUDA_HOME is in the virtual environment, whose path contains the minor release of Python in BASE.
    assert "/lib/python3.11/site-packages/nvidia/cu13" in STAGES["gpu"]


@pytest.mark.parametrize("script", re.findall(r"/images/([\w-]+\.(?:sh|lock))", TEXT))
def test_scripts_that_are_run_exist(script):
    path = ROOT / "deploy" / ("locks" if script.endswith(".lock") else "images") / script
    assert path.is_file()
    assert script.endswith(".lock") or os.access(path, os.X_OK), f"{script} is not executable"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True, timeout=10)


def test_the_context_has_every_package_and_no_data():
    accepted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {"services", "rollout", "verifier", "learner", "deploy", "penstock_client"}
    assert accepted == {"pyproject.toml", "README.md", *packages}
