"""Further arguments of DeepSpeed and vLLM: what a recipe may give, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout.engine import _engine_arguments
from services.settings import RecipeError, parse_recipe
from services.settings.engines.arguments import DEEPSPEED, DEEPSPEED_INSTEAD, VLLM, VLLM_INSTEAD, known
from tests.harness.engine_table import table
from tests.harness.small_run import recipe_document

ZERO = "learner.deepspeed.zero_optimization."


def refused(**sections: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as found:
        parse_recipe(recipe_document("/none", **sections))
    return str(found.value)


def zero(**arguments: Any) -> dict[str, Any]:
    return {"learner": {"zero_stage": 3, "deepspeed": {"zero_optimization": arguments}}}


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_that_of_the_installed_engines() -> None:
    """After an upgrade: read the differences, decide, and run `python -m tests.harness.engine_table`."""
    installed = table()
    for engine, names in known().items():
        found = installed[engine]
        assert sorted(set(found) - set(names)) == [], f"new in {engine}"
        assert sorted(set(names) - set(found)) == [], f"gone from {engine}"
        assert {name: kinds for name, kinds in found.items() if kinds != names[name]} == {}, f"other types in {engine}"


def test_each_argument_is_allowed_or_has_a_substitute() -> None:
    for engine, allowed, instead in (("deepspeed", DEEPSPEED, DEEPSPEED_INSTEAD), ("vllm", VLLM, VLLM_INSTEAD)):
        assert allowed <= set(known()[engine]), engine
        assert not allowed & set(instead), engine
    assert not VLLM & set(_engine_arguments(parse_recipe(recipe_document("/none")), "/none", "r", 32))


def test_arguments_of_speed_and_memory_are_accepted() -> None:
    sections = zero(reduce_bucket_size=5e7, stage3_max_live_parameters=100, overlap_comm=True)
    recipe = parse_recipe(recipe_document("/none", **sections, rollout={"engine": {"max_num_batched_tokens": 512}}))
    assert _engine_arguments(recipe, "/none", "r", 32)["max_num_batched_tokens"] == 512


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (zero(reduce_buket_size=5), f"{ZERO}reduce_buket_size: 5 is not valid: expected an argument that deepspeed "
                                    "has, such as zero_optimization.reduce_bucket_size"),
        (zero(stage=2), f"{ZERO}stage: 2 is not valid: expected learner.zero_stage"),
        (zero(zero_quantized_weights=True), f"{ZERO}zero_quantized_weights: true is not valid: expected no argument, "),
        (zero(reduce_scatter="yes"), f"{ZERO}reduce_scatter: 'yes' is not valid: expected a value of type bool"),
        (zero(sub_group_size=True), f"{ZERO}sub_group_size: true is not valid: expected a value of type float or int"),
        ({"learner": {"deepspeed": {"zero_optimization": 3}}}, "learner.deepspeed.zero_optimization: 3 is not valid: "),
        ({"learner": {"deepspeed": {"optimizer": {}}}}, "learner.deepspeed.optimizer: {} is not valid: expected "),
        ({"learner": {"deepspeed": {"fp16": {}}}}, "learner.deepspeed.fp16: {} is not valid: expected learner.dtype"),
        ({"learner": {"deepspeed": {"wandb": {}}}}, "learner.deepspeed.wandb: {} is not valid: expected one of "),
        ({"rollout": {"engine": {"max_num_batched_token": 5}}}, "rollout.engine.max_num_batched_token: 5 is not valid: "
                                "expected an argument that vllm has, such as max_num_batched_tokens"),
        ({"rollout": {"engine": {"max_num_batched_tokens": "5"}}}, "rollout.engine.max_num_batched_tokens: '5' is not "
                                "valid: expected a value of type int or null"),
        ({"rollout": {"engine": {"seed": 5}}}, "rollout.engine.seed: 5 is not valid: expected seed"),
        ({"rollout": {"engine": {"quantization": "fp8"}}}, "rollout.engine.quantization: 'fp8' is not valid: expected "
                                "no argument, because a weight sync"),
        ({"rollout": {"engine": {"enable_dbo": True}}}, "rollout.engine.enable_dbo: true is not valid: expected "),
        ({"learner": {"zero_stage": 0, "offload_optimizer": True}}, "learner.offload_optimizer: true is not valid: "
                                "expected false with zero_stage = 0"),
        ({"learner": {"zero_stage": 2, "offload_parameters": True}}, "learner.offload_parameters: true is not valid: "
                                "expected false with zero_stage = 2"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(sections: dict[str, Any], expected: str) -> None:
    assert re.match(re.escape(expected), refused(**sections)), refused(**sections)
