"""The workflow that publishes images and chart: off by default, pinned, and its commands run with stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes.chart_package import ChartPackageError, main, package, with_values
from tests.helm.rendering import NEWEST, RAY_API, helm
from tests.images.stand_ins import BILL, DIGEST, calls, write

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "publish.yaml"
BIN = Path(sys.executable).parent
WORKFLOW: dict[str, Any] = yaml.safe_load(FILE.read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
ON: dict[str, Any] = yaml.load(FILE.read_text(), Loader=yaml.BaseLoader)["on"]
"""YAML 1.1 reads the key `on` as true."""
SECRET = "a-password"
EXPRESSIONS = {
    "vars.PENSTOCK_REGISTRY": "registry.example.com/team",
    "secrets.PENSTOCK_REGISTRY_USER || github.actor": "user",
    "secrets.PENSTOCK_REGISTRY_PASSWORD || github.token": SECRET,
    "needs.image.outputs.cpu": DIGEST["cpu"],
    "needs.image.outputs.gpu": DIGEST["gpu"],
}
"""Expressions of the workflow and their values here. `matrix.target` is added for each target."""


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each step, with the name of its job."""
    return ((job, step) for job, content in JOBS.items() for step in content["steps"])


SCRIPTS = [(f"{job}: {step['name']}", str(step["run"])) for job, step in steps() if "run" in step]


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_the_workflow_fits_the_published_schema(schema: str) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", schema, FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_runs_until_the_registry_is_set() -> None:
    assert {job: content["if"] for job, content in JOBS.items()} == dict.fromkeys(JOBS, "vars.PENSTOCK_REGISTRY != ''")
    assert set(ON) == {"push", "workflow_dispatch"}
    assert ON["push"] == {"tags": ["v*"]}


def test_the_permissions_are_what_pushing_and_signing_need() -> None:
    assert WORKFLOW["permissions"] == {}
    wanted = {"contents": "read", "packages": "write", "id-token": "write"}
    assert {job: content["permissions"] for job, content in JOBS.items()} == dict.fromkeys(JOBS, wanted)


def test_passwords_reach_only_the_steps_that_sign_in() -> None:
    def uses(content: object) -> bool:
        return "PASSWORD" in str(content)

    assert not uses({key: value for key, value in WORKFLOW.items() if key != "jobs"})
    for content in JOBS.values():
        assert not uses({key: value for key, value in content.items() if key != "steps"})
        assert [step.get("name") for step in content["steps"] if uses(step)] == ["Sign in to the registry"]
    checkouts = [step for _, step in steps() if "actions/checkout@" in step.get("uses", "")]
    assert len(checkouts) == len(JOBS)
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.+)", FILE.read_text())
    assert len(used) == sum("uses" in step for _, step in steps()) > 0
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_no_registry_is_named() -> None:
    addresses = set(re.findall(r"\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:com|io|dev|org|net)\b", FILE.read_text()))
    assert addresses == {"registry.example.com"}


@pytest.mark.parametrize(("name", "script"), SCRIPTS, ids=lambda value: value if ": " in value else "")
def test_each_script_is_clean_shell(name: str, script: str) -> None:
    assert "${{" not in script, f"{name}: an expression in a script can be used to inject commands"
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    command = [BIN / "shellcheck", "--shell", "bash", "--enable", "quote-safe-variables", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout


def evaluated(entries: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """The environment of a workflow, job or step, with its expressions evaluated; an unknown one fails."""
    return {key: re.sub(r"\$\{\{ (.+?) \}\}", lambda found: values[found[1]], text) for key, text in entries.items()}


def run(job: str, folder: Path, target: str = "", ref: str = "refs/tags/v0.1.0") -> list[tuple[list[str], str]]:
    """Run the scripts of a job in order, with stand-ins; returns their calls."""
    values = {**EXPRESSIONS, "matrix.target": target}
    log = folder / "log"
    environment = {
        **os.environ,
        "PATH": f"{write(folder / 'bin')}:{os.environ['PATH']}",
        "STAND_IN_LOG": str(log),
        "REAL_HELM": str(BIN / "helm"),
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_REF": ref,
        **evaluated(WORKFLOW["env"], values),
        **evaluated(JOBS[job].get("env", {}), values),
    }
    for step in JOBS[job]["steps"]:
        if "run" in step:
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            inside = {**environment, **evaluated(step.get("env", {}), values)}
            done = subprocess.run(command, env=inside, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
    return calls(log)


SIGNED_IN = ["login", "--username", "user", "--password-stdin", "registry.example.com"]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_is_built_pushed_signed_and_attested(target: str, tmp_path: Path) -> None:
    built, bill, *signed_in, pushed, signed, attested = run("image", tmp_path, target)
    image = f"registry.example.com/team/penstock@{DIGEST[target]}"
    assert built[0][:6] == ["buildah", "bud", "--layers", "--target", target, "--tag"]
    assert built[0][6] == f"penstock:0.1.0-{target}"
    assert bill[0][:3] == ["podman", "run", "--rm"]
    assert bill[0][-3:] == [f"penstock:0.1.0-{target}", "cat", "/usr/share/penstock/sbom.cdx.json"]
    assert (tmp_path / "sbom.cdx.json").read_text().strip() == BILL
    assert signed_in == [([program, *SIGNED_IN], f"{SECRET}\n") for program in ("buildah", "cosign")]
    to = f"docker://registry.example.com/team/penstock:0.1.0-{target}"
    assert pushed[0] == ["buildah", "push", "--digestfile", f"{tmp_path}/digest", f"penstock:0.1.0-{target}", to]
    assert (tmp_path / "output").read_text() == f"{target}={DIGEST[target]}\n"
    assert signed[0] == ["cosign", "sign", "--yes", image]
    predicate = ["--type", "cyclonedx", "--predicate", f"{tmp_path}/sbom.cdx.json"]
    assert attested[0] == ["cosign", "attest", "--yes", *predicate, image]
    assert JOBS["image"]["outputs"][target] == f"${{{{ steps.push.outputs.{target} }}}}"


@pytest.mark.parametrize("ref", ["refs/heads/main", "refs/heads/v0.1.0", "refs/tags/v0.1.1"])
def test_only_the_tag_of_the_version_is_published(ref: str, tmp_path: Path) -> None:
    """A run by hand may be of any branch, and its images would get the tags of a released version."""
    (guard,) = [step for step in JOBS["image"]["steps"] if "GITHUB_REF" in step.get("run", "")]
    assert "if" not in guard
    assert JOBS["chart"]["needs"] == "image"
    with pytest.raises(AssertionError, match=rf"{guard['name']}: ::error::run from {ref}: expected refs/tags/v0\.1\.0"):
        run("image", tmp_path, "cpu", ref)
    assert not (tmp_path / "log").exists() or calls(tmp_path / "log") == []


def test_the_chart_is_pushed_with_the_digests_and_signed(tmp_path: Path) -> None:
    packaged, *signed_in, pushed, signed = run("chart", tmp_path)
    assert packaged[0][:2] == ["helm", "package"]
    arguments = SIGNED_IN[1:]
    assert [call for call, _ in signed_in] == [
        ["helm", "registry", "login", *arguments],
        ["cosign", "login", *arguments],
    ]
    archive = tmp_path / "chart" / "penstock-0.1.0.tgz"
    assert pushed[0] == ["helm", "push", str(archive), "oci://registry.example.com/team/charts"]
    assert signed[0] == ["cosign", "sign", "--yes", f"registry.example.com/team/charts/penstock@{DIGEST['chart']}"]
    api = [argument for version in RAY_API for argument in ("--api-versions", version)]
    rendered = helm("template", "demo", str(archive), "--kube-version", NEWEST, *api)
    images = set(re.findall(r"image: \"?([^\"\s]+penstock[^\"\s]*)", rendered))
    assert images == {f"registry.example.com/team/penstock@{DIGEST[target]}" for target in ("cpu", "gpu")}


def test_only_the_wanted_values_change() -> None:
    text = 'image:\n  repository: a\n  cpu:\n    # a digest\n    digest: ""\nredis:\n  image:\n    repository: b\n'
    changed = with_values(text, {"image.repository": "c", "image.cpu.digest": "d"})
    assert changed == text.replace("repository: a", 'repository: "c"').replace('digest: ""', 'digest: "d"')
    with pytest.raises(ChartPackageError, match=r"values\.yaml: no image\.gpu\.digest"):
        with_values(text, {"image.gpu.digest": "d"})


@pytest.mark.parametrize(
    ("repository", "digest", "fault"),
    [
        ("", DIGEST["cpu"], "--repository: '' is not valid"),
        ("registry.example.com/penstock:1", DIGEST["cpu"], "--repository: .* is not valid"),
        ("registry.example.com/penstock", "", "--cpu: '' is not valid"),
        ("registry.example.com/penstock", "sha256:1", "--cpu: 'sha256:1' is not valid"),
    ],
)
def test_bad_input_is_refused_by_name(repository: str, digest: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ChartPackageError, match=fault):
        package(tmp_path, repository, {"cpu": digest})


def test_a_fault_is_one_line_and_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--repository", "x", "--cpu", DIGEST["cpu"], "--gpu", DIGEST["gpu"]]) == 2
    assert capsys.readouterr().err.startswith("chart_package: --repository: 'x' is not valid")
