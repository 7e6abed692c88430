"""The estimate of a learner rank's memory, and the check before anything is loaded."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import MambaConfig

from benchmarks.learner.memory.loading import measure, write_model
from learner.model import memory
from learner.model.memory import GIB, ModelDoesNotFitError, check_memory, learner_memory
from learner.model.shape import ModelShape, folder_shape
from learner.service import LearnerService
from learner.training import trainer
from services.process.hosting import ServiceThread
from services.settings import Recipe, parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from tests.harness.small_run import recipe_document
from tests.learner.running import submit

BIG = ModelShape("big", 8 * GIB, layers=10, hidden=100, vocabulary=1000, kv_values=1, largest=GIB)
CPU = torch.device("cpu")


def recipe(**learner: Any) -> Recipe:
    return parse_recipe(recipe_document("/none", learner={"ranks": 4, "dtype": "bfloat16", **learner}))


def test_a_stage_that_cuts_needs_a_part_and_one_tensor_to_load() -> None:
    need = learner_memory(recipe(gpus=1), BIG, 3)
    assert need.loading == (2 * 8 / 4 + 2) * GIB
    assert need.host_loading == 0
    # Gathered parameters, and two buckets of gradients: DeepSpeed's defaults.
    assert need.buffers == 2 * 1_050_000_000 + 2 * 2 * 500_000_000
    smaller = {"zero_optimization": {"reduce_bucket_size": 1e6, "stage3_max_live_parameters": 2e6}}
    assert learner_memory(recipe(deepspeed=smaller), BIG, 3).buffers == 2 * 52_000_000 + 2 * 2 * 1_000_000
    whole = learner_memory(recipe(), BIG, 2)
    assert (whole.loading, whole.host_loading) == (2 * 8 * GIB, 2 * 8 * GIB)


def test_offloaded_state_counts_on_the_host() -> None:
    plain = learner_memory(recipe(zero_stage=3), BIG, 3)
    assert plain.host == 0
    need = learner_memory(recipe(zero_stage=3, offload_optimizer=True, offload_parameters=True), BIG, 3)
    assert (need.optimizer, need.parameters) == (0, 0)
    assert need.host == plain.optimizer + plain.parameters + 4 * BIG.parameters / 4
    assert need.loading == 0
    assert need.gradients == 0, "DeepSpeed keeps the rank's part on the host"


@pytest.mark.parametrize(
    ("dtype", "stage", "per_rank"), [("bfloat16", 1, 2 * 4 + 4), ("bfloat16", 2, 4), ("float32", 2, 0)]
)
def test_gradients_that_stay_on_the_device_beside_offloading(dtype: str, stage: int, per_rank: int) -> None:
    """Of 4 ranks: 16-bit gradients add up in float32 on the device, at stage 1 beside the whole ones."""
    need = learner_memory(recipe(dtype=dtype, zero_stage=stage, offload_optimizer=True), BIG, stage)
    assert need.gradients == per_rank * BIG.parameters / 4


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text(f"{3 * GIB}\n")
    (tmp_path / "current").write_text(str(GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB, total=120 * GIB))
    monkeypatch.setattr(memory, "CGROUP_LIMITS", [(str(tmp_path / "max"), str(tmp_path / "current"))])
    assert (memory.free_on_host(), memory.host_size()) == (2 * GIB, 3 * GIB)
    (tmp_path / "max").write_text("max\n")
    assert (memory.free_on_host(), memory.host_size()) == (100 * GIB, 120 * GIB)


def test_a_model_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need = learner_memory(recipe(), BIG, 1)
    free = {"bytes": need.held - 1}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free["bytes"]))
    with pytest.raises(
        ModelDoesNotFitError, match=r"^learner.zero_stage: 1 is not valid: expected at most 88.00 GiB"
    ) as found:
        check_memory(recipe(), BIG, CPU)
    for text in ("big with 8.590 billion parameters on 4 ranks", "needs 88.00 GiB", "optimizer 24.00", "penstock plan"):
        assert text in str(found.value)
    free["bytes"] = need.held
    check_memory(recipe(), BIG, CPU)
    assert "may run out of memory" in caplog.text
    caplog.clear()
    free["bytes"] = max(need.total + need.host, need.loading + need.host_loading)
    check_memory(recipe(), BIG, CPU)
    assert caplog.text == ""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need.held - 1, 0))
    with pytest.raises(ModelDoesNotFitError, match="free on the device of a rank"):
        check_memory(recipe(), BIG, torch.device("cuda"))


async def test_the_learner_fails_before_it_loads_anything(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submit(redis, run_id, tiny_model)
    monkeypatch.setattr(memory, "learner_memory", lambda *_: learner_memory(recipe(), BIG, 0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))
    monkeypatch.setattr(trainer, "load_policy", None)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    ends = time.monotonic() + 60
    while thread.error is None:
        assert time.monotonic() < ends, "the learner did not fail"
        await asyncio.sleep(0.05)
    assert isinstance(thread.error, ModelDoesNotFitError)
    events = [event for _, event in await EventLog(redis, RunKeys(run_id), "test").events()]
    assert "expected at most 1.00 GiB" in next(event.text for event in events if event.phase == "service-failed")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.timeout(900)
def test_the_estimate_is_within_15_percent(stage: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path, 0.3)
    found = measure(folder, stage, "float32", 2)
    need = found.need
    assert found.loading == pytest.approx(need.loading, rel=0.15)
    assert found.training == pytest.approx(max(need.peak, need.loading + need.host_loading), rel=0.15)


def test_the_shape_of_a_folder_is_known(tiny_model: Path, tmp_path: Path) -> None:
    """Also of a recurrent model, which has no attention heads."""
    tiny = folder_shape(tiny_model)
    assert tiny is not None
    assert tiny.largest == 256 * 128
    MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2).save_pretrained(tmp_path)
    found = folder_shape(tmp_path)
    assert (found.layers, found.hidden, found.kv_values) == (2, 16, 0)
