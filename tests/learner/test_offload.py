"""State that is kept in the host's memory: the same updates, norms, checkpoints and snapshots as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.training.process_group import Ranks
from learner.training.trainer import Trainer, leave
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from services.settings import parse_recipe
from tests.harness.small_run import recipe_document
from tests.learner.checkpointing import files_of, parameters_of, train, write_state

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
OPTIMIZER = {"offload_optimizer": True}
BOTH = {"offload_optimizer": True, "offload_parameters": True}


@pytest.fixture
def alone() -> Ranks:
    """The only rank; it leaves its group after the test."""
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield ranks
    leave(ranks)


def open_trainer(model: Path, ranks: Ranks, **learner: Any) -> Trainer:
    learner |= {"gradient_clip": 0.05, "weight_decay": 0.1, "warmup_rollout_steps": 0, "learning_rate": 1e-3}
    return Trainer(model, parse_recipe(recipe_document(model, learner=learner)), ranks)


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        (2, "float32", OPTIMIZER),
        (3, "bfloat16", BOTH),
        pytest.param(1, "bfloat16", OPTIMIZER, marks=pytest.mark.slow),
        pytest.param(3, "float32", BOTH, marks=pytest.mark.slow),
        pytest.param(3, "float32", OPTIMIZER, marks=pytest.mark.slow),
    ],
)
def test_offloaded_state_gives_the_same_updates(
    tiny_model: Path, tmp_path: Path, alone: Ranks, stage: int, dtype: str, offload: dict[str, bool]
) -> None:
    plain = open_trainer(tiny_model, alone, zero_stage=stage, dtype=dtype)
    wanted = [train(plain, version, 0) for version in range(3)]
    ended = parameters_of(plain)
    plain.close()
    assert any((step.gradient_norm or 0) > 0.05 for step in wanted[0]), "the gradient must be clipped"
    offloaded = open_trainer(tiny_model, alone, zero_stage=stage, dtype=dtype, **offload)
    found = [train(offloaded, version, 0) for version in range(2)]
    write_state(offloaded.capture(), tmp_path, 0)
    found.append(train(offloaded, 2, 0))
    for ours, theirs in zip(found, wanted, strict=True):
        # DeepSpeed adds the squares of gradients on the host in another order.
        assert [step.gradient_norm for step in ours] == pytest.approx([step.gradient_norm for step in theirs], rel=1e-5)
    same(parameters_of(offloaded), ended)
    snapshot = take_snapshot(offloaded, make_manifest(offloaded, 1), 1, keep=True)
    assert snapshot is not None
    same(dict(snapshot.tensors()), ended)
    offloaded.close()
    restored = open_trainer(tiny_model, alone, zero_stage=stage, dtype=dtype, **offload)
    restored.restore(files_of(tmp_path))
    train(restored, 2, 0)
    same(parameters_of(restored), ended)
    restored.close()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal up to roundings, as of the norm that clips a gradient. A step changes a weight by about 1e-3.

    Adam divides a gradient by its own size, so the rounding of one near its epsilon may change a weight by more.
    """
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        rounding = torch.finfo(tensor.dtype).eps * 2 * tensor.abs()
        difference = (found[name] - tensor).abs() - rounding
        assert difference.max() < 1e-4, name
        assert (difference > 1e-5).float().mean() < 1e-3, name
