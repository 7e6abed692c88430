"""Owns how a policy becomes a DeepSpeed engine: the one that trains, and the frozen reference beside it.

Must not run a step. Nothing is ever compiled here.
"""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from learner.training.policy import PolicyModel
from services.settings import LearnerSettings


def prepare_environment() -> None:
    """Set what DeepSpeed reads when it is first imported, which loading a model may already do."""
    # An interrupted build leaves a lock on which later ones wait for ever: share no folder with anybody.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/penstock-extensions-{os.getpid()}")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # The host gives each rank only its own device.
    os.environ.setdefault("LOCAL_RANK", "0")


def training_engine(policy: PolicyModel, learner: LearnerSettings) -> Any:
    """The DeepSpeed engine that trains `policy` with AdamW. Collective: every rank makes one."""
    import deepspeed
    import deepspeed.comm.comm as deepspeed_comm

    deepspeed.logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # On CPU the communication backend compiles a shared-memory kernel (60 s) if this probe lists it.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    # A backend left by a former engine of this process holds its destroyed group.
    deepspeed_comm.cdb = None
    if learner.dtype == "float64":
        _admit_float64()
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=list(policy.parameters()), config=_config(learner))
    if dist.get_world_size() == 1 and learner.zero_stage == 0:
        # With nobody to reduce with, DeepSpeed would still copy all gradients to a fresh buffer and back at each step.
        engine.enable_backward_allreduce = False
    if learner.dtype == "float64":
        # Else gradients are rounded to float32 to be reduced over ranks.
        engine.communication_data_type = torch.float64
    return engine


def frozen(policy: PolicyModel, learner: LearnerSettings, device: torch.device) -> Any:
    """`policy` as a reference that never changes, on `device`; at ZeRO stage 3 partitioned over ranks like the trained.

    Call it after `training_engine`. Collective. Only `__call__` may be used, and on all ranks alike.
    """
    policy.requires_grad_(False)
    if learner.zero_stage < 3:
        return policy.to(device)
    import deepspeed

    # Without an optimizer DeepSpeed only partitions and gathers.
    engine, *_ = deepspeed.initialize(model=policy, config=_precision(learner) | _zero(learner))
    return engine


def _admit_float64() -> None:
    """DeepSpeed reduces float64 gradients once its accelerator says that it supports them; torch always did."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    known = accelerator.supported_dtypes()
    if torch.float64 not in known:
        accelerator.supported_dtypes = lambda: [*known, torch.float64]


def _precision(learner: LearnerSettings) -> dict[str, Any]:
    return {"bf16": {"enabled": learner.dtype == "bfloat16", "check_grad_overflow": True}}


def _zero(learner: LearnerSettings) -> dict[str, Any]:
    return {
        # Real sizes vary; the trainer sets every accumulation boundary itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "zero_optimization": {"stage": learner.zero_stage, "overlap_comm": False, "contiguous_gradients": True},
    }


def _config(learner: LearnerSettings) -> dict[str, Any]:
    optimizer = {
        "type": "AdamW",
        # Unlike DeepSpeed's own Adams, torch's needs no compiler at start.
        "params": {
            "torch_adam": True, "fused": True, "lr": learner.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8,
            "weight_decay": learner.weight_decay,
        },
    }  # fmt: skip
    # Without ZeRO the trainer clips: the engine would not report the norm.
    clip = learner.gradient_clip if learner.zero_stage else 0.0
    return _precision(learner) | _zero(learner) | {"optimizer": optimizer, "gradient_clipping": clip}
