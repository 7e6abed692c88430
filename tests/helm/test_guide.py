"""Tests the guide: its clusters have room for their runs, its commands exist, its node sizes are the chart's.

Must not repeat what `penstock plan` computes; it calls the same code.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.planning import Throughput, checkpoint_bytes, plan_figures
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


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("penstock bench strat-up", "no benchmark strat-up"),
        ("penstock bench start-up --repeat 2", "unknown option"),
        ("penstock submit r.yaml --repeats 2", "unknown option"),
    ],
)
def test_a_command_that_does_not_exist_is_refused(command: str, refused: str) -> None:
    with pytest.raises(AssertionError, match=f"{command}: {refused}"):
        check_penstock(command.split())


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


LOADED = (17_400, 30)
"""Training prompts of DAPO-Math-17k, about, and problems of AIME 2024."""
THROUGHPUTS = {"7b": (6000.0, 3000.0), "32b": (2500.0, 400.0)}
"""Tokens/s of one replica and of one rank, as the guide gives them, or by the defaults of `penstock plan`."""
SIZES = {
    "7b": (
        "in 7b the learner ({learner}) and Redis ({redis_memory} GiB); in 32b",
        "7b a claim of {claim:.0f} TiB and {volume} GiB for Redis; 32b",
    ),
    "32b": (
        "in 32b the learner ({learner}), two rollout pods on a node ({rollout} each) and Redis"
        " ({redis_cpus} CPUs, {redis_memory} GiB).",
        "; 32b {volume} GiB for Redis.",
        "`storage.s3.scratch.size`, {scratch:,.0f} GiB in 32b",
    ),
}
PLANS = {
    "7b": (
        "it prints: {learner:.0f} GiB on each learner GPU, {replica:.0f} GiB on each rollout GPU, checkpoints of"
        " {checkpoint:.0f} GiB, {step:.0f} s per rollout step, and for {steps} steps {hours:.0f} hours,"
        " {gpu_hours:,.0f} GPU-hours and a cost of {cost:,.0f}",
        "Redis takes {redis:,.0f} MiB, plus {per_prompt:,} bytes for each training prompt and {per_problem:,} bytes for"
        " each evaluation prompt,",
        "that is {whole:.1f} GiB in all, of the {limit:.1f} GiB available.",
    ),
    "32b": (
        "{steps} rollout steps take {hours:.0f} hours and {gpu_hours:,.0f} GPU-hours, which cost {cost:,.0f} at 2.5",
        "Redis takes {redis:,.0f} MiB, plus {per_prompt:,} bytes for each training prompt and {per_problem:,} bytes for"
        " each evaluation prompt: {whole:.1f} GiB in all, of the {limit:.0f} GiB available.",
    ),
}


def guide() -> str:
    """The guide's text without line breaks."""
    return " ".join(GUIDE.read_text().split())


@each("case", [case for case, _ in PAIRS[:2]])
def test_the_guides_pods_and_volumes_are_the_charts(case: Case) -> None:
    rendering = render(case)
    redis = rendering.pod("redis").main.document["resources"]["limits"]
    claims = rendering.one("StatefulSet", "redis").at("spec", "volumeClaimTemplates", 0, "spec")
    figures: dict[str, object] = {role: size_of(rendering.group(role)) for role in ("learner", "rollout")}
    figures |= {"redis_cpus": redis["cpu"], "redis_memory": f"{quantity(redis['memory']) / 2**30:,.10g}"}
    figures["volume"] = f"{quantity(claims['resources']['requests']['storage']) / 2**30:,.10g}"
    if rendering.has("PersistentVolumeClaim"):
        size = rendering.one("PersistentVolumeClaim").at("spec", "resources", "requests", "storage")
        figures["claim"] = quantity(size) / 2**40
    else:
        scratch = next(pod for pod in rendering.pods if pod.component == "learner").volumes["runs"]
        figures["scratch"] = quantity(scratch["emptyDir"]["sizeLimit"]) / 2**30
    for sentence in SIZES[case.name]:
        assert sentence.format(**figures) in guide()


def size_of(group: dict[str, Any]) -> str:
    """The limits of one pod of a group, in the guide's form."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return f"{limits['cpu']} CPUs, {quantity(limits['memory']) / 2**30:,.10g} GiB, {limits['nvidia.com/gpu']} GPUs"


@each("case, name", PAIRS[:2], called=itemgetter(1))
def test_the_guides_figures_are_those_of_the_plan(case: Case, name: str, tmp_path: Path) -> None:
    wanted = recipe(name)
    generation, learning = THROUGHPUTS[case.name]
    stated = Throughput(generation, learning, 25e9, 0.5, wanted.rollout.max_new_tokens / 2)
    plan = plan_figures(wanted, model_shape(wanted.model, tmp_path), stated, 2.5)
    per_prompt, per_problem = plan["redis"]["unsized"].values()
    redis = render(case).pod("redis").main.env["REDIS_MAXMEMORY"]["value"]
    train, problems = LOADED
    rank = plan["learner_rank"][f"stage_{wanted.learner.zero_stage}"]
    parts = ("parameters", "gradients", "optimizer", "reference", "buffers", "activations")
    figures = {
        "learner": sum(rank[part] for part in parts) / 2**30,
        "replica": (plan["replica"]["weights"] + plan["replica"]["staged"]) / 2**30
        + wanted.rollout.kv_cache_mib / 2**10,
        "checkpoint": plan["checkpoint"] / 2**30,
        "step": plan["step"]["total"],
        "steps": wanted.limits.rollout_steps,
        "hours": plan["step"]["total"] * wanted.limits.rollout_steps / 3600,
        "gpu_hours": plan["gpu_hours"],
        "cost": plan["cost"],
        "redis": plan["redis"]["total"] / 2**20,
        "per_prompt": per_prompt,
        "per_problem": per_problem,
        "whole": (plan["redis"]["total"] + train * per_prompt + problems * per_problem) / 2**30,
        "limit": int(redis.removesuffix("mb")) / 2**10,
    }
    for sentence in PLANS[case.name]:
        assert sentence.format(**figures) in guide()


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
