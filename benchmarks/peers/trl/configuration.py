"""Owns how the recipe's settings are given to TRL: the arguments of GRPOConfig for the training comparison.

Must not import TRL, so that the project's own tests cover it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIMIZER = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
"""Those of Penstock's learner (learner/training/deepspeed_engine.py), which are not settings of a recipe."""


def batches(groups: int, group_size: int, updates: int, micro_batch: int) -> dict[str, int]:
    """The batch arguments: a rollout of groups x group_size responses, trained in `updates` optimizer steps.

    TRL generates once per `steps_per_generation` micro-batches, and updates once per `gradient_accumulation_steps` of
    them. `micro_batch`: responses. Raises ValueError if it does not divide an update.
    """
    rollout = groups * group_size
    if rollout % (updates * micro_batch):
        raise ValueError(
            f"micro-batch: {micro_batch} is not valid: expected a divisor of {rollout / updates:g} responses per update"
        )
    return {
        "num_generations": group_size,
        "per_device_train_batch_size": micro_batch,
        "steps_per_generation": rollout // micro_batch,
        "gradient_accumulation_steps": rollout // updates // micro_batch,
    }


def grpo_arguments(
    settings: Mapping[str, Any], *, seed: int, steps: int, micro_batch: int, continuous: bool
) -> dict[str, Any]:
    """The arguments of GRPOConfig that train as the recipe says, for `steps` rollout steps, in float32 on CPU.

    `settings`: as in train.json. `continuous`: generate with transformers' continuous batching. The learning rate is
    constant. Raises ValueError for a warm-up, which the constant schedule has not.
    """
    if settings["warmup_rollout_steps"]:
        raise ValueError(f"warmup_rollout_steps: {settings['warmup_rollout_steps']} is not valid: expected 0")
    updates = settings["updates_per_step"]
    return {
        **batches(settings["groups_per_step"], settings["group_size"], updates, micro_batch),
        **OPTIMIZER,
        "loss_type": "dapo",
        "epsilon": settings["clip_low"],
        "epsilon_high": settings["clip_high"],
        "beta": settings["kl_coefficient"],
        "temperature": settings["temperature"],
        "top_p": settings["top_p"],
        "max_completion_length": settings["max_new_tokens"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": settings["weight_decay"],
        "max_grad_norm": settings["gradient_clip"],
        "max_steps": steps * updates,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        # A user with memory to spare switches it off: it computes every layer twice.
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": continuous,
        "model_init_kwargs": {"dtype": "float32"},
        "save_strategy": "no",
        "logging_steps": updates,
        "report_to": [],
        "disable_tqdm": True,
    }
