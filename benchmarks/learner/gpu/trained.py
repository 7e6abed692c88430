"""Owns the figures of one model at one ZeRO stage, measured in a process that trains nothing else.

Must not be part of `__main__`: a process that is started for it imports this module.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.learner.gpu.flops import peak_flops, step_flops
from benchmarks.learner.gpu.parts import planned_bytes, rollout_steps, snapshot_rate
from benchmarks.learner.gpu.workload import Load, Shape, recipe
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer


def device_name(device: torch.device) -> str:
    """As the driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def quiet() -> None:
    """Leave out the warnings and progress of libraries, so that the table is readable."""
    warnings.simplefilter("ignore")
    disable_progress_bar()


def measured(folder: Path, shape: Shape, stage: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a model at a ZeRO stage: steps, memory and the copy to the host."""
    quiet()
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=600)
    load = Load(options.groups, options.group_size, options.prompt_tokens, options.response_tokens)
    tokens, checkpointing = options.micro_batch_tokens, options.checkpointing
    settings = recipe(folder, load, stage=stage, micro_batch_tokens=tokens, checkpointing=checkpointing)
    trainer = Trainer(folder, settings, ranks)
    parameters = sum(getattr(value, "ds_numel", value.numel()) for value in trainer.causal_lm.parameters())
    steps = rollout_steps(trainer, load, shape.vocabulary, ranks.device, options.steps)
    copied = snapshot_rate(trainer, options.bucket_mib, ranks.device, options.steps)
    flops = step_flops(shape, parameters, load) / steps.seconds
    peak = peak_flops(device_name(ranks.device))
    return {
        "parameters": parameters,
        "stage": stage,
        "step_seconds": steps.seconds,
        "tokens_per_second": load.rows * load.row_tokens / steps.seconds,
        "flops_per_second": flops,
        "mfu": flops / peak[0] if peak else None,
        "peak_bytes": steps.peak_bytes,
        "planned_bytes": planned_bytes(settings, shape, parameters),
        "snapshot_bytes_per_second": copied,
    }
