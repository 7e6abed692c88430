"""The memory that a learner takes on a device is what `penstock plan` says, within 15 %."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learner.gpu.parts import held_bytes, planned_bytes, rollout_steps
from benchmarks.learner.gpu.workload import Load, Shape, recipe, write_model
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from tests.gpu.needs import GIB, device, needs, rehearsing

pytestmark = needs(1, gib=24)
LARGE, SMALL = Shape(1024, 12, 16, 4, 4096, 32_768), Shape(128, 2, 2, 1, 256, 512)
"""About 0.2 billion parameters; what a rehearsal trains instead."""
LOADS = {LARGE: Load(groups=4, size=4, prompt=256, response=769), SMALL: Load(groups=2, size=2, prompt=8, response=9)}


@pytest.fixture(scope="module")
def shape() -> Shape:
    return SMALL if rehearsing() else LARGE


@pytest.fixture(scope="module")
def model(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), shape, device())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "kept"])
def test_a_step_takes_what_is_planned(stage: int, checkpointing: bool, model: Path, shape: Shape, ranks: Ranks) -> None:
    """The peak of later optimizer steps: weights, gradients, Adam's state, and one micro-batch's activations.

    Both numbers are printed. What the allocator reserves, and CUDA's own memory, are not part of them.
    """
    load = LOADS[shape]
    tokens = 4 * (load.row_tokens + 1)
    settings = recipe(model, load, stage=stage, micro_batch_tokens=tokens, checkpointing=checkpointing)
    held = held_bytes(device())
    trainer = Trainer(model, settings, ranks)
    parameters = sum(getattr(value, "ds_numel", value.numel()) for value in trainer.causal_lm.parameters())
    found = rollout_steps(trainer, load, shape.vocabulary, device(), 2, held)
    trainer.close()
    planned = planned_bytes(settings, shape, parameters)
    print(f"ZeRO {stage}: measured {found.peak_bytes / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
    if not rehearsing():
        assert 0.85 <= found.peak_bytes / planned <= 1.15


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpointing_saves_memory(stage: int, model: Path, shape: Shape, ranks: Ranks) -> None:
    """At least half of what the plan says that it saves."""
    load, peaks, plans = LOADS[shape], [], []
    for checkpointing in (False, True):
        tokens = 4 * (load.row_tokens + 1)
        settings = recipe(model, load, stage=stage, micro_batch_tokens=tokens, checkpointing=checkpointing)
        held = held_bytes(device())
        trainer = Trainer(model, settings, ranks)
        parameters = sum(getattr(value, "ds_numel", value.numel()) for value in trainer.causal_lm.parameters())
        peaks.append(rollout_steps(trainer, load, shape.vocabulary, device(), 1, held).peak_bytes)
        plans.append(planned_bytes(settings, shape, parameters))
        trainer.close()
    if not rehearsing():
        assert peaks[0] - peaks[1] > (plans[0] - plans[1]) / 2
