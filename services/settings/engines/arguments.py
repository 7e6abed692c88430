"""Owns the check of further engine arguments: known, allowed, with a value that the engine can take.

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

from services.settings.engines.values import Accepted, described, fits
from services.settings.faults import invalid

EngineArguments = dict[str, Any]
"""Names and values as the engine's own documentation has them."""


_ZERO = "zero_optimization."
DEEPSPEED = frozenset(
    {
        "comms_logger.debug",
        "comms_logger.enabled",
        "comms_logger.prof_all",
        "comms_logger.verbose",
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
                "stage3_allgather_sequential",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_model_persistence_threshold",
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
        "attention_config.flash_attn_version",
        "attention_config.use_trtllm_attention",
        "compilation_config.cudagraph_copy_inputs",
        "compilation_config.cudagraph_mode",
        "compilation_config.mode",
        "compilation_config.use_inductor_graph_partition",
        "cpu_distributed_timeout_seconds",
        "cudagraph_capture_sizes",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "distributed_timeout_seconds",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "linear_backend",
        "long_prefill_token_threshold",
        "max_cudagraph_capture_size",
        "max_num_batched_tokens",
        "moe_backend",
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
"""The arguments of vLLM that a recipe may give: none that names code, a file or an address."""
NARROWER: dict[str, Accepted] = {
    "zero_optimization.allgather_bucket_size": {"least": 1},
    "cpu_distributed_timeout_seconds": {"least": 1},
    "cudagraph_capture_sizes": {"items": {"kinds": ["int"], "least": 1}},
    "distributed_timeout_seconds": {"least": 1},
    "max_cudagraph_capture_size": {"least": 1},
    "numa_bind_cpus": {"items": {"kinds": ["str"], "pattern": r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*"}},
    "numa_bind_nodes": {"items": {"kinds": ["int"], "least": 0}},
    # The last one, torchao, is for quantized weights, which no weight sync could replace.
    "safetensors_load_strategy": {"values": ["lazy", "eager", "prefetch", None]},
}
"""What holds beside known.json: limits that an engine does not state with the type."""
REFUSED_VALUES = {
    # None of them computes the model's attention: no cache, a rounded cache, and code that a plugin registers.
    "attention_backend": frozenset({"NO_ATTENTION", "TURBOQUANT", "ULTRAQUANT", "CUSTOM"}),
}
"""What an engine lists among an argument's values, and no recipe may give."""

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
    # It moves parameters within the flat partition, but not in the table of places that checkpoints read.
    _ZERO + "round_robin_gradients": _STORED,
    _ZERO + "stage3_module_granularity_threshold": "no argument, because log-probs come from a part of the network, "
    "whose parameters would not be gathered",
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
_CODE = "no argument, because it names code that the engine would import"
_IDS = "no argument, because replicas exchange token ids"
VLLM_INSTEAD = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.path",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_scheduled_tokens": "rollout.engine.max_num_batched_tokens; they differ only with draft tokens",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib",
    "num_gpu_blocks_override": "rollout.kv_cache_mib, which it would override",
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
    "attention_config.backend": "rollout.engine.attention_backend",
    "compilation_config.cudagraph_capture_sizes": "rollout.engine.cudagraph_capture_sizes",
    "compilation_config.max_cudagraph_capture_size": "rollout.engine.max_cudagraph_capture_size",
    "compilation_config.backend": _CODE,
    "compilation_config.inductor_passes": _CODE,
    "compilation_config.inductor_compile_config": _CODE,
    "kernel_config": "rollout.engine.moe_backend, linear_backend or enable_flashinfer_autotune",
    "hf_overrides": _POLICY,
    "trust_remote_code": _POLICY,
    "speculative_config": "no argument, because log-probs of draft tokens were not compared with the learner's",
    "kv_transfer_config": "no argument, because a weight sync clears the caches of its own replica only",
    "distributed_executor_backend": "no argument, because the replica starts, watches and ends its own workers",
    "disable_log_stats": "no argument, because replicas have metrics of their own",
}
"""As DEEPSPEED_INSTEAD, for vLLM."""


@cache
def known() -> dict[str, dict[str, Accepted]]:
    """The arguments of the tested engines by name; one within a section has the section's name before a dot."""
    table: dict[str, dict[str, Accepted]] = json.loads((Path(__file__).parent / "known.json").read_text())
    return table


def deepspeed_fault(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with learner.deepspeed, or None."""
    return _fault("deepspeed", "deepspeed", arguments, DEEPSPEED, DEEPSPEED_INSTEAD)


def vllm_fault(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with rollout.engine, or None."""
    return _fault("engine", "vllm", arguments, VLLM, VLLM_INSTEAD)


def schedule_fault(arguments: Mapping[str, Any], max_sequences: int, max_model_len: int) -> str | None:
    """What is wrong with the tokens of vLLM's steps in a valid rollout.engine, or None. Lengths in tokens."""
    tokens = arguments.get("max_num_batched_tokens")
    least = {f"rollout.max_sequences = {max_sequences}": max_sequences}
    if arguments.get("enable_chunked_prefill") is False:
        least[f"model.max_model_len = {max_model_len} with enable_chunked_prefill = false"] = max_model_len
    for setting, limit in least.items():
        if tokens is not None and tokens < limit:
            return invalid("rollout.engine.max_num_batched_tokens", tokens, f"at least {setting}")
    threshold = arguments.get("long_prefill_token_threshold")
    if threshold is not None and threshold > max_model_len:
        expected = f"at most model.max_model_len = {max_model_len}"
        return invalid("rollout.engine.long_prefill_token_threshold", threshold, expected)
    return None


def combination_fault(arguments: Mapping[str, Any]) -> str | None:
    """Which arguments of a valid `engine` vLLM refuses together, or None."""
    sizes, largest = (arguments.get(name) for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"))
    if sizes and largest is not None and largest != max(sizes):
        expected = f"{max(sizes)}, the largest of cudagraph_capture_sizes, or null"
        return invalid("engine.max_cudagraph_capture_size", largest, expected)
    bound: list[str] = arguments.get("numa_bind_cpus") or []
    for name in ("numa_bind_cpus", "numa_bind_nodes"):
        if arguments.get(name) is not None and not arguments.get("numa_bind"):
            return invalid(f"engine.{name}", arguments[name], "null without numa_bind = true")
    for span in ",".join(bound).split(","):
        first, _, last = span.partition("-")
        if last and int(first) > int(last):
            return invalid("engine.numa_bind_cpus", bound, f"ranges that rise; {span!r} falls")
    return None


def _fault(
    field: str, engine: str, given: Mapping[str, Any], allowed: frozenset[str], instead: Mapping[str, str]
) -> str | None:
    sections = {name.partition(".")[0] for name in allowed if "." in name}
    flat: dict[str, Any] = {}
    for name, value in given.items():
        section, dot, rest = name.partition(".")
        if dot:
            return invalid(f"{field}.{name}", value, f"a mapping within a mapping: {section}: {{{rest}: ...}}")
        if name not in sections:
            flat[name] = value
        elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            flat |= {f"{name}.{key}": content for key, content in value.items()}
        else:
            return invalid(f"{field}.{name}", value, "a mapping of argument names to values")
    names = known()[engine]
    for name, value in flat.items():
        where = f"{field}.{name}"
        if name in instead:
            return invalid(where, value, instead[name])
        if name not in names:
            near = get_close_matches(name, sorted(allowed), n=3) or sorted(allowed)
            return invalid(where, value, f"an argument that {engine} has, such as {', '.join(near)}")
        if name not in allowed:
            return invalid(where, value, f"one of the arguments that change only speed or memory: {sorted(allowed)}")
        if not fits(value, accepted := values_of(engine, name)):
            return invalid(where, value, described(accepted))
    return None


def values_of(engine: str, name: str) -> Accepted:
    """The values of one of the known arguments that a recipe may give."""
    accepted: Accepted = {**known()[engine][name], **NARROWER.get(name, {})}
    if refused := REFUSED_VALUES.get(name):
        accepted["values"] = [value for value in accepted["values"] if value not in refused]
    return accepted
