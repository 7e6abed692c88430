"""Owns how DeepSpeed engines are created: the one that trains the policy, and the one for the frozen reference.

Must not run a step or compile anything.
"""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from learner.training.network.loading import Place, Placed, whole
from learner.training.network.policy import PolicyModel
from services.settings import LearnerSettings


def prepare_environment() -> None:
    """Set the environment variables that DeepSpeed reads on its first import, which loading a model may trigger."""
    # An interrupted build leaves a lock, and later builds wait for it forever. A folder per process avoids that.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/penstock-extensions-{os.getpid()}")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # Each rank sees only its own device.
    os.environ.setdefault("LOCAL_RANK", "0")


def _deepspeed() -> Any:
    """The library, prepared for the process group that exists now."""
    import deepspeed
    import deepspeed.comm.comm as deepspeed_comm

    deepspeed.logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # On CPU, the communication backend compiles a shared-memory kernel (60 s) if this table lists it.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    # The backend of a previous engine in this process still refers to its destroyed group.
    deepspeed_comm.cdb = None
    return deepspeed


def place(learner: LearnerSettings, device: torch.device) -> Place:
    """Where the engines below want the parameters of a network: whole on `device`, or at stage 3 this rank's part.

    At stage 3 the result is collective, and every rank gives it the same parameters in the same order.
    """
    if learner.zero_stage < 3:
        return whole(device)
    deepspeed = _deepspeed()

    class Partition(deepspeed.zero.Init):  # type: ignore[name-defined, misc]
        """Cuts parameters that have no values yet."""

        def _zero_init_param(self, param: Any) -> None:
            # That of DeepSpeed also broadcasts the values of rank 0, which do not exist yet.
            self._convert_to_deepspeed_param(param)
            param.partition()

    zero = _zero(learner)["zero_optimization"]
    given: dict[str, Any] = {"mem_efficient_linear": zero.get("memory_efficient_linear", True)}
    if learner.offload_parameters:
        given |= {"remote_device": "cpu", "pin_memory": _pinned()}

    def partition(empty: nn.Parameter) -> Placed:
        parameter: Any = nn.Parameter(torch.empty_like(empty, device=device), empty.requires_grad)
        Partition(module=nn.ParameterList([parameter]), **given)
        part = parameter.ds_tensor
        return Placed(parameter, part, parameter.ds_zero_partition_rank * part.numel())

    return partition


def training_engine(policy: PolicyModel, learner: LearnerSettings, value_rate: float) -> Any:
    """Create the DeepSpeed engine that trains `policy` with AdamW. Collective: every rank creates one.

    `value_rate`: the learning rate of a value head, whose parameters are the optimizer's second group.
    """
    deepspeed = _deepspeed()
    if learner.dtype == "float64":
        _admit_float64()
    _gather_head_once(policy, learner)
    groups = _parameter_groups(policy, learner.learning_rate, value_rate)
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=groups, config=_config(learner))
    if dist.get_world_size() == 1 and learner.zero_stage == 0:
        # With a single rank, DeepSpeed would still copy all gradients to a new buffer and back in each step.
        engine.enable_backward_allreduce = False
    if learner.dtype == "bfloat16" and learner.zero_stage == 0:
        _undo_trial_step(engine.optimizer)
    if learner.dtype == "float64":
        # Otherwise gradients are rounded to float32 before they are reduced over ranks.
        engine.communication_data_type = torch.float64
    return engine


def frozen(policy: PolicyModel, learner: LearnerSettings, device: torch.device) -> Any:
    """Prepare `policy` as a reference that never changes, on `device`.

    At ZeRO stage 3 it is partitioned over ranks, like the policy in training. Collective; call it after
    `training_engine`. Of the result, use only `__call__`, and on all ranks.
    """
    policy.requires_grad_(False)
    if learner.zero_stage < 3:
        return policy.to(device)
    import deepspeed

    _gather_head_once(policy, learner)
    # Without an optimizer, DeepSpeed only partitions and gathers.
    engine, *_ = deepspeed.initialize(model=policy, config=_precision(learner) | _zero(learner))
    return engine


def _parameter_groups(policy: PolicyModel, rate: float, value_rate: float) -> list[dict[str, Any]]:
    groups = [{"params": list(policy.causal_lm.parameters()), "lr": rate}]
    if policy.value_head is not None:
        groups.append({"params": list(policy.value_head.parameters()), "lr": value_rate})
    return groups


def _gather_head_once(policy: PolicyModel, learner: LearnerSettings) -> None:
    """Have ZeRO 3 gather the head's weight with the module that uses it in all chunks, and not for each chunk."""
    if learner.zero_stage == 3:
        import deepspeed

        for parameter in policy.head.gathered:
            deepspeed.zero.register_external_parameter(policy.head, parameter)


def _undo_trial_step(optimizer: Any) -> None:
    """Undo the step without gradient by which DeepSpeed creates Adam's state at stage 0 in bfloat16.

    It decays the weights, and counts as the first one, so that the bias correction of every later step is too small.
    """
    optimizer.optimizer.state.clear()
    for rounded, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(rounded, masters, strict=True):
            master.data.copy_(parameter.data)


def _admit_float64() -> None:
    """Make DeepSpeed's accelerator report float64 as supported, so that it reduces float64 gradients. torch does."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    known = accelerator.supported_dtypes()
    if torch.float64 not in known:
        accelerator.supported_dtypes = lambda: [*known, torch.float64]


def _precision(learner: LearnerSettings) -> dict[str, Any]:
    return {"bf16": {"enabled": learner.dtype == "bfloat16", "check_grad_overflow": True}}


def _pinned() -> bool:
    """Whether host memory is pinned, from which a GPU copies faster."""
    return torch.cuda.is_available()


def _zero(learner: LearnerSettings) -> dict[str, Any]:
    given = dict(learner.deepspeed)
    sections: dict[str, Any] = {"stage": learner.zero_stage, "overlap_comm": False, "contiguous_gradients": True}
    if learner.offload_parameters:
        sections["offload_param"] = {"device": "cpu", "pin_memory": _pinned()}
    return {
        # Placeholders: the real sizes vary, and the trainer sets each accumulation boundary itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "zero_optimization": sections | given.pop("zero_optimization", {}),
    } | given


def _accumulation(learner: LearnerSettings) -> dict[str, Any]:
    """Sum the gradients of micro-batches in float32 where they are bfloat16, so that no small one is rounded away.

    DeepSpeed refuses that at stage 0. At stage 1 it takes another optimizer class, which reduces the sum over ranks
    once per optimizer step, in float32 only if asked to. At stages 2 and 3 gradients are reduced per micro-batch.
    """
    if learner.dtype != "bfloat16" or learner.zero_stage == 0:
        return {}
    reduced = {"communication_data_type": "fp32"} if learner.zero_stage == 1 else {}
    return {"data_types": {"grad_accum_dtype": "fp32"}} | reduced


def _config(learner: LearnerSettings) -> dict[str, Any]:
    optimizer = {
        "type": "AdamW",
        # The Adam of torch, unlike those of DeepSpeed, needs no compiler at start.
        "params": {
            "torch_adam": True,
            "fused": True,
            "lr": learner.learning_rate,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": learner.weight_decay,
        },
    }
    # Without ZeRO the trainer clips the gradient, because the engine would not report its norm.
    clip = learner.gradient_clip if learner.zero_stage else 0.0
    config = _precision(learner) | _zero(learner) | _accumulation(learner)
    config |= {"optimizer": optimizer, "gradient_clipping": clip}
    if learner.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": _pinned()}
        # DeepSpeed's own Adam for hosts is compiled at start.
        config["zero_force_ds_cpu_optimizer"] = False
    return config
