"""Owns the check that the guide's clusters hold their runs: deploy/values beside deploy/recipes.

Must not repeat what `penstock plan` computes; it asks the same code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.planning import checkpoint_bytes, sync_bytes
from learner.model_shape import model_shape
from services.settings import Bounds, Recipe, bookings, load_recipe
from services.streams.footprint import footprint
from tests.helm.cases import CPU
from tests.helm.quantities import quantity
from tests.helm.rendering import ROOT, Case, render

PAIRS = [
    (Case("7b", files=("../../deploy/values/qwen2.5-7b.yaml",)), "qwen2.5-7b-dapo.yaml"),
    (Case("32b", files=("../../deploy/values/qwen2.5-32b.yaml",)), "qwen2.5-32b-dapo.yaml"),
    (CPU, "smollm2-chain-sum.yaml"),
]
IDS = [recipe for _, recipe in PAIRS]


def recipe(name: str) -> Recipe:
    return load_recipe(ROOT / "deploy" / "recipes" / name)


def memory(pod_group: dict[str, object]) -> float:
    """The memory limit of a group's pods, in bytes."""
    template = pod_group["template"]
    assert isinstance(template, dict)
    return quantity(template["spec"]["containers"][0]["resources"]["limits"]["memory"])


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=IDS)
def test_the_run_has_room_within_the_chart_s_bounds(case: Case, name: str) -> None:
    bounds = Bounds.model_validate_json(render(case).one("ConfigMap", name=BOUNDS).at("data", "bounds.json"))
    wanted = recipe(name)
    booked = bookings(wanted, wanted.rollout.replicas)
    assert bounds.shortage(booked, {}) is None
    assert bounds.most_replicas(wanted) == bounds.rollout.pods * (bounds.rollout.per_pod(booked["rollout"][0]) or 0)


BOUNDS = "demo-penstock-bounds"


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=IDS)
def test_redis_holds_what_the_run_keeps_there(case: Case, name: str) -> None:
    redis = render(case).pod("redis").main
    limit = next(entry["value"] for key, entry in redis.env.items() if key == "REDIS_MAXMEMORY")
    assert limit.endswith("mb")
    # Nothing new is dispatched from 85 % on.
    assert int(limit.removesuffix("mb")) * 2**20 * 0.85 > footprint(recipe(name)).total


@pytest.mark.parametrize(("case", "name"), PAIRS[:2], ids=IDS[:2])
def test_checkpoints_fit_on_the_disk_and_through_the_memory(case: Case, name: str, tmp_path: Path) -> None:
    wanted, rendering = recipe(name), render(case)
    shape = model_shape(wanted.model, tmp_path)
    checkpoint, kept = checkpoint_bytes(wanted, shape), wanted.learner.checkpoints_kept + 1
    if rendering.has("PersistentVolumeClaim"):
        room = quantity(rendering.one("PersistentVolumeClaim").at("spec", "resources", "requests", "storage"))
    else:
        learner = next(one for one in rendering.pods if one.component == "learner")
        room = quantity(learner.volumes["runs"]["emptyDir"]["sizeLimit"])
    assert room > kept * checkpoint + sync_bytes(wanted, shape)
    ranks_a_pod = wanted.learner.ranks / json.loads(
        rendering.one("ConfigMap", name=BOUNDS).at("data", "bounds.json")
    )["learner"]["pods"]  # fmt: skip
    assert memory(rendering.group("learner")) > 2 * checkpoint * ranks_a_pod / wanted.learner.ranks
    if wanted.weights.staging == "host":
        per_pod = wanted.rollout.tensor_parallel * sync_bytes(wanted, shape)
        assert memory(rendering.group("rollout")) > per_pod
