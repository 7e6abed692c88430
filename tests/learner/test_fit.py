"""Whether a run fits GPUs of a stated memory, before anything of it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.model.fit import check_fit, check_machine, host_memory, replica_memory
from learner.model.memory import GIB, ModelDoesNotFitError, held_bytes, learner_memory
from learner.model.shape import ModelShape, folder_shape, recorded_shape
from services.settings import ModelSettings, Recipe, parse_recipe
from tests.harness.small_run import recipe_document

BIG = ModelShape("big", 8 * GIB, layers=10, hidden=100, vocabulary=1000, kv_values=1000, largest=GIB)
ON_GPU = {"gpus": 1.0, "dtype": "bfloat16"}


def recipe(learner: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return parse_recipe(
        recipe_document(
            "/none",
            learner={**ON_GPU, "ranks": 4, **(learner or {})},
            rollout={**ON_GPU, "kv_cache_mib": 4096, **(rollout or {})},
            **sections,
        )
    )


def test_a_stage_that_cannot_fit_is_refused_with_those_that_do() -> None:
    wanted = recipe({"zero_stage": 1})
    held = learner_memory(wanted, BIG, 1).held / GIB
    check_fit(wanted, BIG, held, None)
    with pytest.raises(
        ModelDoesNotFitError, match=r"^learner.zero_stage: 1 is not valid: expected a stage at"
    ) as found:
        check_fit(wanted, BIG, held - 1, None)
    for text in (
        "holds at most 87.00 GiB (a GPU of learner.gpuMemoryGiB = 87 in the chart): 2 or 3;",
        "big with 8.590 billion parameters on 4 ranks needs 88.00 GiB there",
        "optimizer 24.00",
        "penstock plan",
    ):
        assert text in str(found.value)
    with pytest.raises(ModelDoesNotFitError, match=r"none fits with learner.ranks = 4"):
        check_fit(wanted, BIG, 1.0, None)


def test_workers_that_cannot_share_a_model_are_refused(tiny_model: Path) -> None:
    wanted = recipe({"ranks": 1}, {"gpus": 3.0, "tensor_parallel": 3})
    shape = folder_shape(tiny_model)
    assert shape is not None
    expected = (
        rf"^rollout.tensor_parallel: 3 is not valid: expected a divisor of {shape.heads}, the attention heads of "
    )
    with pytest.raises(ModelDoesNotFitError, match=expected):
        check_fit(wanted, shape, None, None)
    check_fit(recipe({"ranks": 1}, {"gpus": 2.0, "tensor_parallel": 2}), shape, None, None)
    check_fit(wanted, BIG, None, None)


def test_a_process_has_only_its_share_of_a_gpu() -> None:
    half = recipe({"ranks": 1, "gpus": 0.5, "zero_stage": 0}, {"gpus": 0.5})
    held = learner_memory(half, BIG, 0).held / GIB
    check_fit(half, BIG, 2 * held, None)
    with pytest.raises(ModelDoesNotFitError, match=r"0\.5 of a GPU of learner.gpuMemoryGiB"):
        check_fit(half, BIG, 2 * held - 1, None)
    need = replica_memory(half, BIG)
    used = (need.weights + need.staged) / GIB + 4
    check_fit(half, BIG, None, 2 * used)
    with pytest.raises(ModelDoesNotFitError, match=r"0\.5 of a GPU of rollout.gpuMemoryGiB"):
        check_fit(half, BIG, None, 2 * used - 1)


def test_a_replica_is_refused_with_the_cache_that_would_fit() -> None:
    # 16 GiB of weights over two workers, each with a staged version of 16 GiB and 4 GiB of cache.
    wanted = recipe(rollout={"gpus": 2.0, "tensor_parallel": 2}, weights={"staging": "device"})
    check_fit(wanted, BIG, None, 28)
    with pytest.raises(
        ModelDoesNotFitError,
        match=r"^rollout.kv_cache_mib: 4096 is not valid: expected at most 3072; each worker has 27",
    ) as found:
        check_fit(wanted, BIG, None, 27)
    assert "weights 8.00 GiB, staged weights 16.00 GiB, KV cache 4.00 GiB; see `penstock plan`" in str(found.value)
    with pytest.raises(
        ModelDoesNotFitError, match=r"^rollout.tensor_parallel: 2 is not valid: expected .*, or weights.staging: host;"
    ):
        check_fit(wanted, BIG, None, 20)


def test_both_sides_are_reported_at_once() -> None:
    with pytest.raises(ModelDoesNotFitError, match=r"^learner\.zero_stage: .*; rollout\.tensor_parallel: "):
        check_fit(recipe(), BIG, 1, 1)


ON_CPU = {"gpus": 0.0, "dtype": "float32"}


def test_a_run_larger_than_the_only_machine_names_its_parts() -> None:
    # 32 GiB per version: weights, gradients, two moments and a master copy on two ranks; two replicas stage a version.
    wanted = recipe({**ON_CPU, "ranks": 2, "zero_stage": 3}, ON_CPU)
    needed = 5 * 32 + 32 + 2 * (32 + 32 + 4)
    check_machine(wanted, BIG, 2, needed * GIB)
    refusal = (
        r"^model\.path: '/none' is not valid: expected a model with which the run fits the 327\.00 GiB of the only "
        r"machine; big with 8\.590 billion parameters needs at least 328\.00 GiB on 2 ranks and 2 replicas \(learner "
        r"ranks 160\.00, their snapshot 32\.00, rollout weights 64\.00, staged weights 64\.00, KV caches 8\.00\); see "
    )
    with pytest.raises(ModelDoesNotFitError, match=refusal):
        check_machine(wanted, BIG, 2, (needed - 1) * GIB)
    check_machine(wanted, BIG, 1, (needed - 68) * GIB)


def test_what_gpus_hold_is_not_counted_on_the_machine() -> None:
    """Of an offloaded optimizer the host keeps its states; rank 0 keeps the snapshot that it broadcasts."""
    assert host_memory(recipe(), BIG.parameters, 3).total == 16 * GIB
    offloading = recipe({"zero_stage": 2, "offload_optimizer": True})
    states = 4 * held_bytes(offloading, BIG.parameters, 2).host
    assert states > 0
    assert host_memory(offloading, BIG.parameters, 3).learner == states


def test_a_run_that_only_evaluates_needs_its_replicas_only() -> None:
    wanted = recipe(ON_CPU, ON_CPU, limits={"rollout_steps": 0})
    assert host_memory(wanted, BIG.parameters, 1).total == (32 + 4) * GIB


@pytest.mark.parametrize(
    ("wanted", "gib"),
    [
        (recipe(), (None, None)),
        (recipe({"gpus": 0.0}, {"gpus": 0.0}), (1, 1)),
        (recipe(limits={"rollout_steps": 0}), (1, None)),
    ],
    ids=["unknown memory", "on CPU", "no learner"],
)
def test_what_is_unknown_or_absent_is_not_checked(wanted: Recipe, gib: tuple[float | None, float | None]) -> None:
    check_fit(wanted, BIG, *gib)


def test_the_shape_is_found_by_the_name_in_the_record(tiny_model: Path, tmp_path: Path) -> None:
    model = ModelSettings(path=str(tiny_model))
    assert recorded_shape(model, str(tiny_model), tmp_path) == folder_shape(tiny_model)
