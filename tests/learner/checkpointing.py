"""Owns trainers whose state is saved and restored in tests, and states on disk outside a checkpoint.

Must not be used outside tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint, CheckpointHeader
from learner.checkpoint.partial import Writable
from learner.training.process_group import Ranks
from learner.training.tensor_files import HostBlock, TensorLayout
from learner.training.trainer import Trainer
from services.contracts import Fence, OptimizerStepRecord, StepRecord
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from tests.harness.small_run import recipe_document
from tests.learner.cases import large_for_zero
from tests.learner.committed import WRITER, record_of
from tests.learner.running import draw_batch

NEVER = threading.Event()


def open_trainer(
    model: Path, stage: int, dtype: str, ranks: Ranks, *, deepspeed: dict[str, Any] | None = None, **algorithm: Any
) -> Trainer:
    # The warm-up's learning rate shows whether its counter was restored; weight decay, whether the weights were.
    learner = {"zero_stage": stage, "dtype": dtype, "warmup_rollout_steps": 8, "weight_decay": 0.1}
    learner |= {"deepspeed": deepspeed or {}}
    document = recipe_document(model, learner=learner, algorithm=algorithm)
    with large_for_zero():
        return Trainer(model, parse_recipe(document), ranks)


def train(trainer: Trainer, version: int, rank: int) -> tuple[OptimizerStepRecord, ...]:
    """Two optimizer steps."""
    batch, payloads = draw_batch(RunKeys("run"), version)
    plans = trainer.plan(batch)
    own = {sample.payload for plan in plans for sample in plan.shares[rank]}
    return trainer.train(plans, {key: payloads[key] for key in own}).optimizer


def write_state(block: HostBlock, folder: Path, rank: int) -> None:
    """Write a rank's file, as in a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank:04d}.safetensors").write_bytes(b"".join(block.chunks()))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of all ranks, read by the format's own library. Each must exist once."""
    found: dict[str, Tensor] = {}
    for path in files_of(folder):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, for comparisons in which 0.0 differs from -0.0."""
    return tensor.contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)


def parameters_of(trainer: Trainer) -> dict[str, Tensor]:
    """The policy's parameters, whole, on every rank."""
    found = {}
    for name, parameter in trainer.causal_lm.named_parameters():
        with trainer.gathered([parameter]):
            found[name] = parameter.detach().clone()
    return found


def block_of(values: int, seed: int = 0) -> HostBlock:
    """A state of `values` random float32."""
    block = HostBlock({"master.weight": TensorLayout(torch.float32, (values,))})
    block["master.weight"].copy_(torch.randn(values, generator=torch.Generator().manual_seed(seed)))
    return block


@dataclass
class Slow:
    """A state whose first chunk is written immediately, and the rest when `go` is set."""

    state: Writable
    begun: threading.Event
    go: threading.Event

    def chunks(self) -> Iterator[memoryview]:
        for chunk in self.state.chunks():
            yield chunk
            self.begun.set()
            assert self.go.wait(60), "`go` was not set within 60 s"


def archive_with(folder: Path, steps: int) -> RunArchive:
    """A run's archive with the batches of steps 1 to `steps`, each trained by one rank."""
    archive = RunArchive(folder)
    archive.prepare()
    for version in range(steps):
        batch, payloads = draw_batch(RunKeys("run"), version)
        archive.write_share(batch, 0, payloads, WRITER)
        archive.write_batch(batch, WRITER)
    return archive


def records_of(steps: int) -> dict[int, StepRecord]:
    """The committed records of the batches in `archive_with`."""
    return {version + 1: record_of(draw_batch(RunKeys("run"), version)[0]) for version in range(steps)}


def names(archive: RunArchive) -> list[str]:
    """The names in the checkpoints folder."""
    return sorted(path.name for path in archive.checkpoints.iterdir())


def header(step: int, ranks: int = 1, version: int | None = None, fence: Fence = WRITER) -> CheckpointHeader:
    version, owner = step if version is None else version, {"epoch": fence.epoch, "owner": fence.owner}
    return CheckpointHeader(step=step, version=version, ranks=ranks, zero_stage=1, dtype="float32", **owner)


def save(checkpoints: Checkpoints, at: CheckpointHeader, *states: Writable, sampler: str | None = None) -> Checkpoint:
    """A complete checkpoint, with one rank per state."""
    name = checkpoints.partial.start(at.step, Fence(at.epoch, at.owner))
    for rank, state in enumerate(states):
        checkpoints.partial.write(name, rank, state, NEVER)
    return checkpoints.commit(name, at.model_copy(update={"ranks": len(states)}), NEVER, sampler=sampler)
