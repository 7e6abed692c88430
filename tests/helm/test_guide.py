"""Tests the guide: its clusters have room for their runs, its commands exist, its node sizes are the chart's.

Must not repeat what `penstock plan` computes; it calls the same code.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from deploy.cli.planning import checkpoint_bytes
from learner.model.fit import sync_bytes
from learner.model.shape import model_shape
from services.settings import ClusterLimits, Recipe, load_recipe, resource_requests
from services.streams.memory_bound import footprint
from services.streams.memory_plan import NEAR
from tests.harness.documented_commands import check_penstock, commands_of, console_commands, inline_commands
from tests.harness.each import each
from tests.helm.cases import CPU, DIGEST
from tests.helm.quantities import quantity
from tests.helm.rendering import CHART, NEWEST, PROMETHEUS_API, RAY_API, ROOT, Case, helm, render

PAIRS = [
    (Case("7b", files=("../../deploy/values/qwen2.5-7b.yaml",)), "qwen2.5-7b-dapo.yaml"),
    (Case("32b", files=("../../deploy/values/qwen2.5-32b.yaml",)), "qwen2.5-32b-dapo.yaml"),
    (CPU, "smollm2-chain-sum.yaml"),
]


def recipe(name: str) -> Recipe:
    return load_recipe(ROOT / "deploy" / "recipes" / name)


def memory(pod_group: dict[str, object]) -> float:
    """The memory limit of a group's pods, in bytes."""
    template = pod_group["template"]
    assert isinstance(template, dict)
    return quantity(template["spec"]["containers"][0]["resources"]["limits"]["memory"])


@each("case, name", PAIRS, called=itemgetter(1))
def test_the_run_has_room_within_the_charts_limits(case: Case, name: str) -> None:
    bounds = ClusterLimits.model_validate_json(render(case).one("ConfigMap", name=BOUNDS).at("data", "bounds.json"))
    wanted = recipe(name)
    booked = resource_requests(wanted, wanted.rollout.replicas)
    assert bounds.shortage(booked, {}) is None
    assert bounds.most_replicas(wanted) == bounds.rollout.pods * (bounds.rollout.per_pod(booked["rollout"][0]) or 0)


BOUNDS = "demo-penstock-bounds"


@each("case, name", PAIRS, called=itemgetter(1))
def test_redis_holds_what_the_run_keeps_there(case: Case, name: str) -> None:
    redis = render(case).pod("redis").main
    limit = next(entry["value"] for key, entry in redis.env.items() if key == "REDIS_MAXMEMORY")
    assert limit.endswith("mb")
    # The run is accepted without a warning.
    assert int(limit.removesuffix("mb")) * 2**20 * NEAR > footprint(recipe(name)).total


@each("case, name", PAIRS[:2], called=itemgetter(1))
def test_checkpoints_fit_on_the_disk_and_through_the_memory(case: Case, name: str, tmp_path: Path) -> None:
    wanted, rendering = recipe(name), render(case)
    shape = model_shape(wanted.model, tmp_path)
    checkpoint, kept = checkpoint_bytes(wanted, shape), wanted.learner.checkpoints_kept + 1
    if rendering.has("PersistentVolumeClaim"):
        room = quantity(rendering.one("PersistentVolumeClaim").at("spec", "resources", "requests", "storage"))
    else:
        learner = next(pod for pod in rendering.pods if pod.component == "learner")
        room = quantity(learner.volumes["runs"]["emptyDir"]["sizeLimit"])
    assert room > kept * checkpoint + sync_bytes(wanted, shape)
    ranks_a_pod = (
        wanted.learner.ranks
        / json.loads(rendering.one("ConfigMap", name=BOUNDS).at("data", "bounds.json"))["learner"]["pods"]
    )
    assert memory(rendering.group("learner")) > 2 * checkpoint * ranks_a_pod / wanted.learner.ranks
    if wanted.weights.staging == "host":
        per_pod = wanted.rollout.tensor_parallel * sync_bytes(wanted, shape)
        assert memory(rendering.group("rollout")) > per_pod


PAGES = [ROOT / "README.md", CHART / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = ROOT / "docs" / "cluster.md"


@each("page", PAGES, called=lambda page: page.relative_to(ROOT))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for words in console_commands(text):
        if words[0] == "penstock":
            check_penstock(words)
    for words in inline_commands(text):
        if words[0] == "penstock":
            check_penstock(words, named=True)


def test_the_commands_that_helm_prints_after_an_install_exist() -> None:
    commands = [
        line for line in (CHART / "templates" / "NOTES.txt").read_text().splitlines() if line.startswith("  penstock ")
    ]
    assert len(commands) > 2
    for line in commands:
        for words in commands_of(line):
            check_penstock(words)


def guide_s_helm() -> list[tuple[str, ...]]:
    """The files and values of each `helm install` or `upgrade` of the chart in the guide and the README."""
    found = []
    for page in (GUIDE, ROOT / "README.md"):
        for words in console_commands(page.read_text()):
            if words[0] == "helm" and words[1] in ("install", "upgrade") and "helm/penstock" in words:
                pairs = [(flag, value) for flag, value in pairwise(words) if flag in ("-f", "--set")]
                given = tuple(word.replace("SUBSTITUTED", DIGEST) for pair in pairs for word in pair)
                if "--reuse-values" in words:
                    given = ("-f", "deploy/values/qwen2.5-7b.yaml", *given)
                found.append(given)
    return found


@each("given", guide_s_helm)
def test_the_chart_accepts_the_values_of_the_guide(given: tuple[str, ...]) -> None:
    api = [argument for version in (*RAY_API, *PROMETHEUS_API) for argument in ("--api-versions", version)]
    # Its schema rejects an unknown value.
    helm("template", "penstock", "helm/penstock", "--kube-version", NEWEST, *api, *given)


NODES = {
    "7b": ({"head", "cpu", "verifier", "rollout", "learner"}, {"api", "redis"}),
    "32b": ({"rollout", "learner"}, {"api", "redis", "head", "cpu", "verifier"}),
}


@each("case, name", PAIRS[:2], called=itemgetter(1))
def test_the_guides_node_sizes_are_the_pods_requests(case: Case, name: str) -> None:
    for components in NODES[case.name]:
        (row,) = [
            row.split(" | ")
            for row in re.findall(rf"^\| {case.name} \| (.+) \|$", GUIDE.read_text(), re.M)
            if {component.lower() for component in row.split(" | ")[1].split(", ")} == components
        ]
        assert row[2:] == [requested(case, components, "minReplicas"), requested(case, components, "maxReplicas")]


def requested(case: Case, components: set[str], count: str) -> str:
    """The requests of these components' pods, `count` pods of each group, in the guide's form."""
    sums = dict.fromkeys(("cpu", "memory", "nvidia.com/gpu"), 0.0)
    for pod in render(case).lasting_pods:
        if pod.component in components:
            pods = pod.owner.at("spec", "replicas", default=1)
            if pod.owner.kind == "RayCluster" and pod.component != "head":
                pods = render(case).group(pod.component)[count]
            for container in pod.containers:
                for resource, value in container.document["resources"]["requests"].items():
                    sums[resource] = sums.get(resource, 0.0) + pods * quantity(value)
    text = f"{sums['cpu']:,.10g} CPUs, {sums['memory'] / 2**30:,.10g} GiB"
    return text + (f", {sums['nvidia.com/gpu']:.0f} GPUs" if sums["nvidia.com/gpu"] else "")
