"""The rehearsal's commands fit the chart: labels, names and values of the rendering, options of helm, kubectl."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from services.settings import ClusterLimits, load_recipe, resource_requests
from tests.harness.documented_commands import check_penstock
from tests.harness.each import each
from tests.harness.programs import needed
from tests.helm.rendering import CHART, NEWEST, RAY_API, Rendering, helm, parse
from tests.kind import commands
from tests.kind.drills import PROTECTED
from tests.kind.stand_in import COMPONENTS

BIN = Path(sys.executable).parent
UPGRADES = ("rollout.maxReplicas=3", "logLevel=DEBUG")
"""The values that the drills change."""
ARCHIVE = Path("image.tar")
CLUSTER = "penstock-test-1"
COMMANDS = [
    commands.create_namespace(),
    commands.install_operator(),
    commands.install_chart(),
    *(commands.upgrade_chart(setting, force=False) for setting in UPGRADES),
    commands.test_release(),
    commands.uninstall(),
    commands.pods(),
    commands.pods("head"),
    commands.claims(),
    commands.ray_clusters(),
    commands.delete_pod("penstock-head"),
    commands.drain("node"),
    commands.uncordon("node"),
    commands.token(),
    commands.penstock("runs"),
    *commands.describe(),
]


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return parse(helm("template", *installed(commands.install_chart())))


def installed(command: list[str]) -> list[str]:
    """The arguments of `helm install` that `helm template` has, too, with a cluster like the one of the rehearsal."""
    api = [argument for name in RAY_API for argument in ("--api-versions", name)]
    arguments = command[2:]
    timeout = arguments.index("--timeout")
    return [*arguments[:timeout], *arguments[timeout + 2 :], "--kube-version", NEWEST, *api]


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_selector_finds_the_pods_of_its_component(component: str, rendering: Rendering) -> None:
    wanted = dict(label.split("=") for label in commands.selector(component).split(","))
    found = [pod for pod in rendering.pods if wanted.items() <= pod.labels.items()]
    assert found == [rendering.pod(component)]


def test_the_releases_selector_finds_all_its_pods(rendering: Rendering) -> None:
    wanted = dict(label.split("=") for label in commands.selector().split(","))
    assert all(wanted.items() <= pod.labels.items() for pod in rendering.lasting_pods)


def test_the_stand_in_has_the_charts_components(rendering: Rendering) -> None:
    assert {pod.component for pod in rendering.lasting_pods} == {*COMPONENTS, "verifier-code"}


def test_the_names_are_those_of_the_chart(rendering: Rendering) -> None:
    assert rendering.one("Deployment", "api").name == commands.penstock()[5].removeprefix("deployment/")
    assert rendering.one("Secret", "api").name == commands.token()[5]
    assert "admin-token" in rendering.one("Secret", "api").at("data")
    redis = rendering.one("StatefulSet", "redis")
    template = redis.at("spec", "volumeClaimTemplates")[0]["metadata"]["name"]
    claim = rendering.one("PersistentVolumeClaim")
    assert (claim.name, f"{template}-{redis.name}-0") == commands.CLAIMS
    assert claim.kept
    assert {manifest.at("metadata", "namespace") for manifest in rendering.manifests} == {commands.NAMESPACE}


def test_the_protected_components_have_budgets(rendering: Rendering) -> None:
    budgets = {budget.component: budget for budget in rendering.all("PodDisruptionBudget")}
    assert {name for name, budget in budgets.items() if budget.at("spec", "minAvailable") == 1} == set(PROTECTED)


def test_every_image_of_penstock_is_the_one_that_is_loaded(rendering: Rendering) -> None:
    images = {container.document["image"] for pod in rendering.pods for container in pod.containers}
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    redis = rendering.pod("redis").main.document["image"]
    assert images - {redis} == {f"{commands.REPOSITORY}:{version}-cpu"}
    assert commands.save("docker", version, ARCHIVE)[-1] in images
    assert commands.tag("docker", version)[-1] in images


@pytest.mark.parametrize("setting", UPGRADES)
def test_the_chart_accepts_the_upgrades(setting: str) -> None:
    helm("template", *installed(commands.install_chart()), "--set", setting)


def test_the_drills_run_fits_the_release(rendering: Rendering) -> None:
    recipe = load_recipe(commands.RECIPE)
    bounds = ClusterLimits.model_validate_json(
        rendering.one("ConfigMap", name="penstock-bounds").at("data", "bounds.json")
    )
    assert bounds.shortage(resource_requests(recipe, recipe.rollout.replicas), {}) is None
    # Two steps before a drill, and enough after it.
    assert recipe.limits.rollout_steps >= 10


def test_kubernetes_is_the_newest_that_the_chart_accepts() -> None:
    assert commands.NODE_IMAGE.partition(":v")[2].startswith(NEWEST.rpartition(".")[0] + ".")
    nodes = yaml.safe_load(commands.NODES.read_text())
    assert [node["role"] for node in nodes["nodes"]] == ["control-plane", "worker", "worker"]
    assert nodes["networking"] == {"ipFamily": "ipv4"}


def test_kuberay_is_the_one_of_the_guide() -> None:
    guide = (commands.ROOT / "docs" / "cluster.md").read_text()
    assert f"--version {commands.KUBERAY}" in guide
    assert commands.KUBERAY_CHARTS in guide


def penstock_commands() -> Iterator[list[str]]:
    """Each `penstock` command of the drills."""
    yield from (["penstock", *words.split()] for words in CALLS)


CALLS = ("runs --json", "submit /dev/stdin", "show RUN --json", "events RUN", "cancel RUN")


@each("words", penstock_commands, called=" ".join)
def test_the_penstock_commands_exist(words: list[str]) -> None:
    check_penstock(words)


def test_the_token_is_read_from_standard_input(tmp_path: Path) -> None:
    program = tmp_path / "penstock"
    program.write_text('#!/bin/sh\necho "$PENSTOCK_TOKEN $*"; cat\n')
    program.chmod(0o755)
    command = commands.penstock("submit", "/dev/stdin")
    inside = command[command.index("--") + 1 :]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        inside,
        input="secret\nname: x\nlast: line",
        capture_output=True,
        text=True,
        env=environment,
        timeout=10,
        check=True,
    )
    assert done.stdout == "secret submit /dev/stdin\nname: x\nlast: line"
    checked = [BIN / "shellcheck", "--shell", "sh", "-"]
    subprocess.run(checked, input=commands.IN_POD, text=True, check=True, timeout=30)


def accepted(command: list[str], program: Path, folder: Path) -> str:
    """What a program says without a cluster."""
    environment = {**os.environ, "KUBECONFIG": str(folder / "none"), "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [program, *command[1:]],
        cwd=commands.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        input="",
        timeout=30,
    )
    return done.stdout + done.stderr


WRONG = ("unknown flag", "unknown shorthand", "unknown command", "requires at least", "exactly", "invalid argument")


@pytest.mark.parametrize("program", ["helm", "kubectl"])
def test_the_programs_know_the_options(program: str, tmp_path: Path) -> None:
    path = BIN / "helm" if program == "helm" else needed("kubectl")
    known = [command for command in COMMANDS if command[0] == program and "--repo" not in command]
    assert len(known) > 4
    for command in known:
        said = accepted(command, path, tmp_path)
        assert any(part in said for part in ("refused", "unreachable", "no configuration")), f"{command}: {said}"
        assert not any(part in said for part in WRONG), f"{command}: {said}"
    assert "unknown flag" in accepted([*known[0], "--no-such-option"], path, tmp_path)


def test_the_cluster_is_named_in_each_command_of_kind() -> None:
    named = [
        commands.create_cluster(CLUSTER, commands.NODE_IMAGE),
        commands.load(CLUSTER, ARCHIVE),
        commands.export_logs(CLUSTER, Path("logs")),
        commands.delete_cluster(CLUSTER),
    ]
    assert all(command[command.index("--name") + 1] == CLUSTER for command in named)


def test_the_target_of_the_image_exists() -> None:
    makefile = (commands.ROOT / "Makefile").read_text()
    assert "image-cpu image-gpu: image-%:" in makefile
    assert "test-kind:\n\t$(PYTHON) -m tests.kind.run" in makefile
    assert commands.build("docker") == ["make", "image-cpu", "BUILDER=docker build"]
