"""Further arguments of DeepSpeed and vLLM: what a recipe may give, and what is refused by name."""

from __future__ import annotations

import re
from datetime import date
from math import inf, nan
from typing import Any

import pytest
import yaml

from rollout.engine import _engine_arguments
from services.settings import Recipe, RecipeError, parse_recipe
from services.settings.engines.arguments import DEEPSPEED, DEEPSPEED_INSTEAD, VLLM, VLLM_INSTEAD, known, values_of
from services.settings.engines.values import Accepted, fits
from tests.harness.engine_table import table
from tests.harness.small_run import recipe_document

ZERO = "learner.deepspeed.zero_optimization."
LENGTH = 4096


def refused(**sections: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as found:
        parse_recipe(recipe_document("/none", **sections))
    return str(found.value)


def zero(**arguments: Any) -> dict[str, Any]:
    return {"learner": {"zero_stage": 3, "deepspeed": {"zero_optimization": arguments}}}


@pytest.mark.xdist_group("vllm")  # which this process then imports, and so another need not
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_that_of_the_installed_engines() -> None:
    """After an upgrade: read the differences, decide, and run `python -m tests.harness.engine_table`."""
    installed = table()
    for engine, names in known().items():
        found = installed[engine]
        assert sorted(set(found) - set(names)) == [], f"new in {engine}"
        assert sorted(set(names) - set(found)) == [], f"gone from {engine}"
        assert {name: values for name, values in found.items() if values != names[name]} == {}, f"changed in {engine}"


def test_each_argument_is_allowed_or_has_a_substitute() -> None:
    for engine, allowed, instead in (("deepspeed", DEEPSPEED, DEEPSPEED_INSTEAD), ("vllm", VLLM, VLLM_INSTEAD)):
        assert allowed <= set(known()[engine]), engine
        assert not allowed & set(instead), engine
    assert not VLLM & set(_engine_arguments(parse_recipe(recipe_document("/none")), "/none", "r", 32))


def allowed_arguments() -> list[tuple[str, str, Accepted]]:
    pairs = (("deepspeed", DEEPSPEED), ("vllm", VLLM))
    return [(engine, name, values_of(engine, name)) for engine, allowed in pairs for name in sorted(allowed)]


def given(engine: str, name: str, value: Any) -> dict[str, Any]:
    """The sections of a recipe with one argument."""
    section, dot, rest = name.partition(".")
    arguments = {section: {rest: value} if dot else value}
    if engine == "deepspeed":
        return {"learner": {"deepspeed": arguments}}
    beside = {"numa_bind": True} if name in ("numa_bind_cpus", "numa_bind_nodes") else {}
    return {"model": {"path": "/none", "max_model_len": LENGTH}, "rollout": {"engine": beside | arguments}}


def examples(values: Accepted) -> list[Any]:
    """Some values that fit."""
    if "values" in values:
        return values["values"]
    if "items" in values:
        return [["0-3"] if "pattern" in values["items"] else examples(values["items"])]
    least = max(values.get("least", 1), LENGTH)
    by_kind = {"null": None, "bool": True, "int": least, "whole": float(least)}
    return [by_kind[kind] for kind in values["kinds"]]


@pytest.mark.filterwarnings("ignore")
def test_what_is_accepted_is_stored_and_taken_by_the_engine(tmp_path) -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    built = {"comms_logger": CommsLoggerConfig, "zero_optimization": DeepSpeedZeroConfig}
    for engine, name, values in allowed_arguments():
        for value in examples(values):
            recipe = parse_recipe(recipe_document("/none", **given(engine, name, value)))
            assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
            if engine == "vllm":
                AsyncEngineArgs(**_engine_arguments(recipe, str(tmp_path), "r", 32))
            for section, arguments in recipe.learner.deepspeed.items():
                if section in built:
                    built[section](**arguments)


LISTS = ([], [[4096]], [nan], [date(2026, 11, 24)], [{1: 2}], ["a"])


@pytest.mark.parametrize(
    "wrong",
    [inf, -inf, nan, -1, 2**63, 1.5, "x", "", date(2026, 11, 24), {1}, b"1", {1: 2}, {"a": 1}, *LISTS],
    ids=repr,
)
def test_no_argument_has_such_a_value(wrong: Any) -> None:
    for engine, name, values in allowed_arguments():
        assert not fits(wrong, values), name
        found = refused(**given(engine, name, wrong))
        assert found.startswith(f"{'learner.deepspeed' if engine == 'deepspeed' else 'rollout.engine'}.{name}: "), found


def test_numbers_are_finite_and_within_their_limits() -> None:
    fraction: Accepted = {"kinds": ["float"], "least": 0, "most": 1}
    assert [value for value in (0, 1, 0.5, 1.5, -0.5, inf, nan, True, "0.5") if fits(value, fraction)] == [0, 1, 0.5]
    assert [value for value in (inf, -inf, nan, 5.5) if fits(value, {"kinds": ["float"]})] == [5.5]
    assert [value for value in (5e8, 0.5, inf, nan, 1e300, 7) if fits(value, {"kinds": ["whole"]})] == [5e8, 7]
    assert [value for value in (1.0, True, 1, 5, None) if fits(value, {"values": [1, 2, 3]})] == [1]
    assert not fits("module.function", {"kinds": ["str"]}), "a text without a pattern"


def test_a_mapping_that_contains_itself_is_refused() -> None:
    sections = yaml.safe_load("learner: {deepspeed: {zero_optimization: &a {reduce_scatter: *a}}}")
    assert refused(**sections).startswith(f"{ZERO}reduce_scatter: ")


def test_no_argument_names_code_or_a_file() -> None:
    """vLLM imports the passes of a compilation_config as soon as AsyncEngineArgs is made."""
    for name, value in {
        "inductor_passes": {"a": "module.function"},
        "backend": "module.function",
        "inductor_compile_config": {"post_grad_custom_pre_pass": "module.function"},
        "cache_dir": "/tmp",
        "debug_dump_path": "/tmp",
        "local_cache_dir": "/tmp",
        "splitting_ops": ["a"],
        "compile_ranges_endpoints": [5],
        "custom_ops": ["none"],
        "pass_config": {"fuse_norm_quant": True},
        "pass_config.fuse_norm_quant": True,
    }.items():
        found = refused(rollout={"engine": {"compilation_config": {"mode": 3, name: value}}})
        assert found.startswith(f"rollout.engine.compilation_config.{name}: "), found


def test_arguments_of_speed_and_memory_are_accepted() -> None:
    sections = zero(reduce_bucket_size=5e7, stage3_max_live_parameters=100, overlap_comm=True)
    recipe = parse_recipe(recipe_document("/none", **sections, rollout={"engine": {"max_num_batched_tokens": 512}}))
    assert _engine_arguments(recipe, "/none", "r", 32)["max_num_batched_tokens"] == 512


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            zero(reduce_buket_size=5),
            f"{ZERO}reduce_buket_size: 5 is not valid: expected an argument that deepspeed "
            "has, such as zero_optimization.reduce_bucket_size",
        ),
        (zero(stage=2), f"{ZERO}stage: 2 is not valid: expected learner.zero_stage"),
        (zero(zero_quantized_weights=True), f"{ZERO}zero_quantized_weights: true is not valid: expected no argument, "),
        (zero(reduce_scatter="yes"), f"{ZERO}reduce_scatter: 'yes' is not valid: expected a value of type bool"),
        (
            zero(sub_group_size=True),
            f"{ZERO}sub_group_size: true is not valid: expected a value of type whole number, at least 0",
        ),
        (
            zero(reduce_bucket_size=0),
            f"{ZERO}reduce_bucket_size: 0 is not valid: expected a value of type whole number, at least 1",
        ),
        (zero(stage3_prefetch_bucket_size=1.5), f"{ZERO}stage3_prefetch_bucket_size: 1.5 is not valid: "),
        (
            zero(stage3_max_live_parameters=-(10**12)),
            f"{ZERO}stage3_max_live_parameters: -1000000000000 is not valid: ",
        ),
        (zero(allgather_bucket_size=0), f"{ZERO}allgather_bucket_size: 0 is not valid: "),
        (
            zero(overlap_comm={"a": 1}),
            f"{ZERO}overlap_comm: {{'a': 1}} is not valid: expected a value of type bool or null",
        ),
        (
            {"learner": {"deepspeed": {"zero_optimization": {1: 2}}}},
            "learner.deepspeed.zero_optimization: {1: 2} is not valid: expected a mapping of argument names to values",
        ),
        ({"learner": {"deepspeed": {1: 2}}}, "learner.deepspeed.1"),
        (
            {"learner": {"deepspeed": {"zero_optimization.reduce_bucket_size": 5}}},
            f"{ZERO}reduce_bucket_size: 5 is not "
            "valid: expected a mapping within a mapping: zero_optimization: {reduce_bucket_size: ",
        ),
        (
            {"learner": {"deepspeed": {"comms_logger": 5}}},
            "learner.deepspeed.comms_logger: 5 is not valid: expected a mapping of argument names to values",
        ),
        ({"learner": {"deepspeed": {"zero_optimization": 3}}}, "learner.deepspeed.zero_optimization: 3 is not valid: "),
        ({"learner": {"deepspeed": {"optimizer": {}}}}, "learner.deepspeed.optimizer: {} is not valid: expected "),
        ({"learner": {"deepspeed": {"fp16": {}}}}, "learner.deepspeed.fp16: {} is not valid: expected learner.dtype"),
        ({"learner": {"deepspeed": {"wandb": {}}}}, "learner.deepspeed.wandb: {} is not valid: expected one of "),
        (
            {"rollout": {"engine": {"max_num_batched_token": 5}}},
            "rollout.engine.max_num_batched_token: 5 is not valid: "
            "expected an argument that vllm has, such as max_num_batched_tokens",
        ),
        (
            {"rollout": {"engine": {"max_num_batched_tokens": "5"}}},
            "rollout.engine.max_num_batched_tokens: '5' is not valid: expected a value of type int or null, at least 1",
        ),
        (
            zero(round_robin_gradients=True),
            f"{ZERO}round_robin_gradients: true is not valid: expected no argument, because checkpoints",
        ),
        (
            zero(stage3_module_granularity_threshold=30000),
            f"{ZERO}stage3_module_granularity_threshold: 30000 is not valid: expected no argument, because log-probs",
        ),
        (
            {"rollout": {"engine": {"max_num_scheduled_tokens": 8192}}},
            "rollout.engine.max_num_scheduled_tokens: 8192 is not valid: expected rollout.engine.max_num_batched_",
        ),
        (
            {"rollout": {"engine": {"long_prefill_token_threshold": 257}}},
            "rollout.engine.long_prefill_token_threshold: 257 is not valid: expected at most model.max_model_len = 256",
        ),
        (
            {"rollout": {"engine": {"cudagraph_capture_sizes": [1, 4, 2], "max_cudagraph_capture_size": 8}}},
            "rollout.engine.max_cudagraph_capture_size: 8 is not valid: expected 4, the largest of ",
        ),
        (
            {"rollout": {"engine": {"numa_bind_nodes": [0]}}},
            "rollout.engine.numa_bind_nodes: [0] is not valid: expected null without numa_bind = true",
        ),
        (
            {"rollout": {"engine": {"numa_bind": True, "numa_bind_cpus": ["0-2", "4,7-5"]}}},
            "rollout.engine.numa_bind_cpus: ['0-2', '4,7-5'] is not valid: expected ranges that rise; '7-5' falls",
        ),
        (
            {"rollout": {"engine": {"attention_backend": "CUSTOM"}}},
            "rollout.engine.attention_backend: 'CUSTOM' is not valid: expected one of 'FLASH_ATTN', ",
        ),
        ({"rollout": {"engine": {"stream_interval": 0}}}, "rollout.engine.stream_interval: 0 is not valid: "),
        (
            {"rollout": {"engine": {"attention_backend": "no_such"}}},
            "rollout.engine.attention_backend: 'no_such' is not valid: expected one of 'FLASH_ATTN', ",
        ),
        (
            {"rollout": {"engine": {"performance_mode": "fastest"}}},
            "rollout.engine.performance_mode: 'fastest' is not "
            "valid: expected one of 'balanced', 'interactivity', 'throughput'",
        ),
        ({"rollout": {"engine": {"optimization_level": -5}}}, "rollout.engine.optimization_level: -5 is not valid: "),
        (
            {"rollout": {"engine": {"cudagraph_capture_sizes": ["a"]}}},
            "rollout.engine.cudagraph_capture_sizes: ['a'] "
            "is not valid: expected a value of type list or null with at least one item, each a "
            "value of type int, at least 1",
        ),
        (
            {"rollout": {"engine": {"compilation_config": 5}}},
            "rollout.engine.compilation_config: 5 is not valid: expected a mapping of argument names to values",
        ),
        (
            {"rollout": {"engine": {"max_num_batched_tokens": 1}}},
            "rollout.engine.max_num_batched_tokens: 1 is not valid: expected at least rollout.max_sequences = ",
        ),
        (
            {"rollout": {"engine": {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}}},
            "rollout.engine."
            "max_num_batched_tokens: 64 is not valid: expected at least model.max_model_len = 256 "
            "with enable_chunked_prefill = false",
        ),
        (
            {"rollout": {"engine": {"num_gpu_blocks_override": 0}}},
            "rollout.engine.num_gpu_blocks_override: 0 is not valid: expected rollout.kv_cache_mib",
        ),
        (
            {"rollout": {"engine": {"safetensors_load_strategy": "torchao"}}},
            "rollout.engine.safetensors_load_strategy: "
            "'torchao' is not valid: expected one of 'lazy', 'eager', 'prefetch', null",
        ),
        ({"rollout": {"engine": {"seed": 5}}}, "rollout.engine.seed: 5 is not valid: expected seed"),
        (
            {"rollout": {"engine": {"quantization": "fp8"}}},
            "rollout.engine.quantization: 'fp8' is not valid: expected no argument, because a weight sync",
        ),
        ({"rollout": {"engine": {"enable_dbo": True}}}, "rollout.engine.enable_dbo: true is not valid: expected "),
        (
            {"learner": {"zero_stage": 0, "offload_optimizer": True}},
            "learner.offload_optimizer: true is not valid: expected false with zero_stage = 0",
        ),
        (
            {"learner": {"zero_stage": 2, "offload_parameters": True}},
            "learner.offload_parameters: true is not valid: expected false with zero_stage = 2",
        ),
    ],
)
def test_what_is_refused_is_named(sections: dict[str, Any], expected: str) -> None:
    assert re.match(re.escape(expected), refused(**sections)), refused(**sections)
