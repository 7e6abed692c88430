"""Owns the check of further engine arguments: known, allowed, of the right type.

Must not import an engine. An argument is allowed if it only changes speed or memory: what is trained and sampled, and
how weights are stored and sent, follows from the recipe's own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from services.settings.faults import invalid

EngineArguments = dict[str, Any]
"""Names and values as the engine's own documentation has them."""

_ZERO = "zero_optimization."
DEEPSPEED = frozenset(
    {
        "comms_logger",
        "disable_python_gc",
        "dump_state",
        "memory_breakdown",
        "wall_clock_breakdown",
        *(
            _ZERO + name
            for name in (
                "allgather_bucket_size",
                "allgather_partitions",
                "contiguous_gradients",
                "enable_sanity_checks",
                "ignore_unused_parameters",
                "log_trace_cache_warnings",
                "memory_efficient_linear",
                "overlap_comm",
                "reduce_bucket_size",
                "reduce_scatter",
                "round_robin_gradients",
                "stage3_allgather_sequential",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_model_persistence_threshold",
                "stage3_module_granularity_threshold",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "stage3_use_all_reduce_for_fetch_params",
                "sub_group_size",
                "use_multi_rank_bucket_allreduce",
            )
        ),
    }
)
"""The arguments of DeepSpeed that a recipe may give."""
VLLM = frozenset(
    {
        "all2all_backend",
        "async_scheduling",
        "attention_backend",
        "attention_config",
        "compilation_config",
        "cpu_distributed_timeout_seconds",
        "cudagraph_capture_sizes",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "distributed_timeout_seconds",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "kernel_config",
        "linear_backend",
        "long_prefill_token_threshold",
        "max_cudagraph_capture_size",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "moe_backend",
        "num_gpu_blocks_override",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "optimization_level",
        "performance_mode",
        "prefix_caching_hash_algo",
        "safetensors_load_strategy",
        "scheduler_reserve_full_isl",
        "stream_interval",
        "use_fp64_gumbel",
        "use_tqdm_on_load",
    }
)
"""The arguments of vLLM that a recipe may give."""

_BATCH = "learner.mini_batch_groups and learner.micro_batch_tokens, from which the batches of each step follow"
_DTYPE = "learner.dtype"
_STORED = (
    "no argument, because checkpoints and weight syncs read the weights as the stages of learner.zero_stage hold them"
)
_SUM = "no argument, because the gradient is the exact sum over ranks"
DEEPSPEED_INSTEAD = {
    "optimizer": "learner.learning_rate and learner.weight_decay; the optimizer is AdamW, whose state checkpoints hold",
    "scheduler": "learner.warmup_rollout_steps",
    "gradient_clipping": "learner.gradient_clip",
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "fp16": _DTYPE,
    "bf16": _DTYPE,
    "bfloat16": _DTYPE,
    "amp": _DTYPE,
    "torch_autocast": _DTYPE,
    "data_types": _DTYPE,
    "communication_data_type": _SUM,
    "prescale_gradients": _SUM,
    "gradient_predivide_factor": _SUM,
    "gradient_allreduce_op": _SUM,
    "checkpoint": "learner.checkpoint_every",
    "activation_checkpointing": "learner.activation_checkpointing",
    "weight_quantization": _STORED,
    "tensor_parallel": _STORED,
    "expert_parallel": _STORED,
    "pipeline": _STORED,
    _ZERO + "stage": "learner.zero_stage",
    _ZERO + "offload_optimizer": "learner.offload_optimizer",
    _ZERO + "offload_param": "learner.offload_parameters",
    _ZERO + "cpu_offload": "learner.offload_optimizer",
    _ZERO + "cpu_offload_param": "learner.offload_parameters",
    _ZERO + "zero_hpz_partition_size": _STORED,
    _ZERO + "zero_quantized_weights": _STORED,
    _ZERO + "zero_quantized_nontrainable_weights": _STORED,
    _ZERO + "zero_quantized_gradients": _SUM,
}
"""What to give instead of an argument that would contradict a setting or a promise."""

_LOGPROBS = "no argument, because behaviour log-probs are those of the distribution that tokens are sampled from"
_SYNC = (
    "no argument, because a weight sync replaces the weights by the learner's, under their names and in rollout.dtype"
)
_POLICY = "no argument, because the learner trains exactly the model that is sampled"
_IDS = "no argument, because replicas exchange token ids"
VLLM_INSTEAD = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.path",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "rollout.max_sequences",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib",
    "gpu_memory_utilization": "rollout.kv_cache_mib",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.tensor_parallel, over which weights are sent",
    "data_parallel_size": "rollout.replicas",
    "enforce_eager": "rollout.eager",
    "logprobs_mode": _LOGPROBS,
    "max_logprobs": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "generation_config": "rollout.temperature and rollout.top_p, with which the learner computes log-probs too",
    "override_generation_config": "rollout.temperature and rollout.top_p",
    "enable_prefix_caching": "no argument, because a group's responses share their prompt's cache",
    "block_size": "no argument, because a group's responses share their prompt's cache",
    "kv_cache_dtype": "no argument, because a rounded cache changes behaviour log-probs",
    "skip_tokenizer_init": _IDS,
    "tokenizer_mode": _IDS,
    "quantization": _SYNC,
    "quantization_config": _SYNC,
    "load_format": _SYNC,
    "enable_lora": _SYNC,
    "model_impl": _SYNC,
    "cpu_offload_gb": _SYNC,
    "weight_transfer_config": _SYNC,
    "worker_cls": _SYNC,
    "worker_extension_cls": _SYNC,
    "enable_sleep_mode": _SYNC,
    "hf_overrides": _POLICY,
    "trust_remote_code": _POLICY,
    "speculative_config": "no argument, because log-probs of draft tokens were not compared with the learner's",
    "kv_transfer_config": "no argument, because a weight sync clears the caches of its own replica only",
    "distributed_executor_backend": "no argument, because the replica starts, watches and ends its own workers",
    "disable_log_stats": "no argument, because replicas have metrics of their own",
}
"""As DEEPSPEED_INSTEAD, for vLLM."""


@cache
def known() -> dict[str, dict[str, list[str]]]:
    """The arguments of the tested engines, with the kinds of their values; an empty list stands for any."""
    table: dict[str, dict[str, list[str]]] = json.loads((Path(__file__).parent / "known.json").read_text())
    return table


def deepspeed_fault(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with learner.deepspeed, or None."""
    zero = arguments.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        return invalid("deepspeed.zero_optimization", zero, "a mapping of argument names to values")
    flat = {name: value for name, value in arguments.items() if name != "zero_optimization"}
    flat |= {_ZERO + name: value for name, value in zero.items()}
    return _fault("deepspeed", "deepspeed", flat, DEEPSPEED, DEEPSPEED_INSTEAD)


def vllm_fault(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with rollout.engine, or None."""
    return _fault("engine", "vllm", arguments, VLLM, VLLM_INSTEAD)


def _fault(
    field: str, engine: str, given: Mapping[str, Any], allowed: frozenset[str], instead: Mapping[str, str]
) -> str | None:
    names = known()[engine]
    for name, value in given.items():
        where = f"{field}.{name}"
        if name in instead:
            return invalid(where, value, instead[name])
        if name not in names:
            near = get_close_matches(name, sorted(allowed), n=3) or sorted(allowed)
            return invalid(where, value, f"an argument that {engine} has, such as {', '.join(near)}")
        if name not in allowed:
            return invalid(where, value, f"one of the arguments that change only speed or memory: {sorted(allowed)}")
        if names[name] and _kind(value) not in _accepted(names[name]):
            return invalid(where, value, f"a value of type {' or '.join(names[name])}")
    return None


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _accepted(kinds: list[str]) -> set[str]:
    return {*kinds, "int"} if "float" in kinds else set(kinds)
