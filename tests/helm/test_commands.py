"""Tests that what the manifests start exists: modules, their flags, scripts, the recipe of `helm test`.

Must not start a service; test_api_starts.py does that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import yaml

from services.settings import ClusterLimits, parse_recipe, resource_requests
from tests.harness.each import each
from tests.helm.cases import CASES, CPU, DEFAULTS, EVERYTHING, REWARDED, ROLES
from tests.helm.rendering import CHART, FULLNAME, ROOT, Case, Container, PodTemplate, render

SHELLS = ("sh", "/bin/sh")
OF_RAY = ("ray", "kuberay-autoscaler")
HELP_S = 120.0


def commands(case: Case) -> dict[tuple[str, ...], tuple[PodTemplate, Container]]:
    """Every command line of a case, with its place."""
    return {tuple(container.command): (pod, container) for pod in render(case).pods for container in pod.containers}


def module_of(command: tuple[str, ...]) -> str:
    """The module of a `python -m MODULE ...`, else empty."""
    return command[2] if command[:2] == ("python", "-m") else ""


@cache
def every_command() -> dict[tuple[str, ...], tuple[PodTemplate, Container]]:
    """The command lines that the chart can start."""
    return {line: found for case in (DEFAULTS, CPU, EVERYTHING, REWARDED) for line, found in commands(case).items()}


def subcommand_of(line: tuple[str, ...]) -> tuple[str, ...]:
    """The module of a command line and its subcommand, whose `--help` is read."""
    module, *rest = line[2:]
    before_flags = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    return (module, *(word for word in rest[:before_flags] if word.isidentifier()))


@cache
def helps() -> dict[tuple[str, ...], tuple[int, str]]:
    """The `--help` of each module by command, without colours and wide enough that no flag is cut."""
    commands_of_modules = sorted({subcommand_of(line) for line in every_command() if module_of(line)})
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helm.help_texts"],
        input=json.dumps(commands_of_modules),
        text=True,
        cwd=ROOT,
        capture_output=True,
        timeout=HELP_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        command: (status, text)
        for command, (status, text) in zip(commands_of_modules, json.loads(done.stdout), strict=True)
    }


def test_the_release_starts_the_expected_modules() -> None:
    started = {
        pod.component: container.command
        for pod, container in every_command().values()
        if container.name != "autoscaler"
    }
    assert started["api"] == [
        "python",
        "-m",
        "services.api",
        "--host",
        "0.0.0.0",
        "--port",
        "8470",
        "--patience",
        "110",
    ]
    assert started["head"] == ["python", "-m", "deploy.kubernetes.head"]
    for role in ROLES:
        assert started[role] == ["python", "-m", "deploy.kubernetes.node", "--role", role]
    assert started["redis"] == ["sh", "/etc/penstock/redis/start.sh"]
    assert started["functions"] == [
        *("python", "-m", "verifier.remote.functions"),
        *("--listen", "0.0.0.0:8480", "--processes", "8"),
    ]
    assert set(started) == {"api", "head", *ROLES, "redis", "functions", "test", "uninstall"}


@each("line", lambda: sorted(line for line in every_command() if module_of(line)), called=" ".join)
def test_a_module_accepts_its_command_line(line: tuple[str, ...]) -> None:
    module, *rest = line[2:]
    assert find_spec(module), f"there is no module {module}"
    status, text = helps()[subcommand_of(line)]
    assert status == 0, text[-2000:]
    missing = [
        word
        for word in rest
        if word.startswith("--") and word.split("=")[0] not in text.split() and f"{word} " not in text.replace(",", " ")
    ]
    assert missing == [], text


@each("line", lambda: [line for line in every_command() if not module_of(line)], called=" ".join)
def test_a_script_is_mounted_or_is_part_of_ray(line: tuple[str, ...]) -> None:
    pod, container = every_command()[line]
    assert line[0] in SHELLS, line
    if line[1] == "-c":
        assert all(word in line[2] for word in OF_RAY), line
        return
    folder, _, name = line[1].rpartition("/")
    volume = pod.volumes[container.mounts[folder]["name"]]
    assert volume["configMap"]["name"], "the script is not from a ConfigMap"
    text = (CHART / "files" / f"redis-{name}").read_text(encoding="utf-8")
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_scripts_inside_arguments_are_valid_shell() -> None:
    for pod in render(DEFAULTS).pods:
        for container in pod.containers:
            line = container.command
            if line[:2] == ["sh", "-c"]:
                done = subprocess.run(
                    ["sh", "-n"], input=line[2], capture_output=True, text=True, timeout=60, check=False
                )
                assert done.returncode == 0, (pod, done.stderr)


@cache
def flags_of_ray(command: str) -> frozenset[str]:
    """The flags of a command of Ray's command line."""
    from ray.scripts.scripts import cli

    return frozenset(flag for parameter in cli.commands[command].params for flag in parameter.opts)


def test_rays_autoscaler_accepts_its_flags() -> None:
    script = next(
        word for line in every_command() if line[:2] == ("sh", "-c") for word in line if "kuberay-autoscaler" in word
    )
    flags = set(re.findall(r"--[\w-]+", script))
    assert flags == {"--cluster-name", "--cluster-namespace"}
    assert flags <= flags_of_ray("kuberay-autoscaler")


def test_rays_start_knows_every_parameter_of_the_groups() -> None:
    cluster = render(DEFAULTS).cluster
    groups = [cluster.at("spec", "headGroupSpec"), *cluster.at("spec", "workerGroupSpecs")]
    assert {f"--{name}" for group in groups for name in group["rayStartParams"]} <= flags_of_ray("start")


@each("case", CASES)
def test_the_run_of_helm_test_is_a_valid_recipe(case: Case) -> None:
    rendering = render(case)
    pod = next(pod for pod in rendering.pods if "test" in pod.owner.hooks)
    mount, volume = next(
        (path, pod.volumes[mount["name"]])
        for path, mount in pod.main.mounts.items()
        if "configMap" in pod.volumes[mount["name"]]
    )
    path = next(word for word in pod.main.command if word.startswith(mount))
    text = rendering.one("ConfigMap", name=volume["configMap"]["name"]).at("data", path.removeprefix(f"{mount}/"))
    recipe = parse_recipe(yaml.safe_load(text))
    assert recipe.limits.rollout_steps <= 3, "a small run"


def test_the_runs_recipe_is_within_the_limits() -> None:
    mixed = [DEFAULTS.but({role: {"gpus": 0}}) for role in ("rollout", "learner")]
    for case in (DEFAULTS, CPU, *mixed):
        rendering = render(case)
        text = rendering.one("ConfigMap", "test").at("data", "recipe.yaml")
        recipe = parse_recipe(yaml.safe_load(text))
        bounds = rendering.one("ConfigMap", name=f"{FULLNAME}-bounds").at("data", "bounds.json")
        assert (
            ClusterLimits.model_validate_json(bounds).shortage(resource_requests(recipe, recipe.rollout.replicas), {})
            is None
        ), case
        gpus = {role: rendering.group(role)["rayStartParams"]["num-gpus"] != "0" for role in ("rollout", "learner")}
        assert gpus == {"rollout": recipe.rollout.gpus > 0, "learner": recipe.learner.gpus > 0}
        assert recipe.weights.backend == ("nccl" if all(gpus.values()) else "gloo")
