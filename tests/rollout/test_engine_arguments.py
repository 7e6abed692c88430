"""The engine's arguments whose defaults in vLLM would silently change the policy."""

import os

import pytest

from rollout.engine import EngineError, RolloutEngine, _engine_arguments
from rollout.processes.environment import engine_environment
from services.contracts import nucleus_limit
from services.settings import Recipe, RecipeError, parse_recipe
from tests.harness.small_run import recipe_document


def arguments(**rollout):
    return _engine_arguments(parse_recipe(recipe_document("/m", rollout=rollout)), "/m", "rollout-0", 16)


@pytest.mark.conformance(formula="rollout without CUDA graphs", setting="rollout.eager")
@pytest.mark.parametrize(("eager", "gpus", "expected"), [(False, 1, False), (True, 1, True), (False, 0, True)])
def test_eager(eager, gpus, expected):
    assert arguments(eager=eager, gpus=gpus)["enforce_eager"] is expected


@pytest.mark.conformance(formula="behaviour log-probs are those of the sampling distribution", setting="rollout")
def test_log_probs_and_sampling_follow_the_recipe_only():
    found = arguments()
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["generation_config"] == "vllm"


def test_the_head_of_the_engine_follows_the_recipe():
    assert "hf_overrides" not in arguments()
    document = recipe_document("/m", model={"head_dtype": "float32"})
    found = _engine_arguments(parse_recipe(document), "/m", "rollout-0", 16)
    assert found["hf_overrides"] == {"head_dtype": "float32"}


def test_the_engine_s_metrics_name_no_path_and_log_nothing():
    found = arguments()
    assert (found["served_model_name"], found["disable_log_stats"]) == ("policy", True)


def test_a_nucleus_and_one_token_more_can_be_requested():
    """vLLM refuses a request for more log-probs than `max_logprobs`."""
    assert "max_logprobs" not in arguments()
    assert arguments(top_k=20)["max_logprobs"] == nucleus_limit(20) + 1 > 21


async def test_a_run_of_an_earlier_release_with_top_p_does_not_start():
    stored = Recipe.model_validate(recipe_document("/m", rollout={"top_p": 0.9}))
    with pytest.raises(RecipeError, match=r"rollout\.top_p: 0\.9 is not valid"):
        await RolloutEngine.start(stored, "/m", [], "rollout-0")


@pytest.mark.parametrize(("gpus", "tensor_parallel", "alone"), [(0, 1, True), (0, 2, False), (1, 1, False)])
def test_an_engine_on_one_processor_is_its_own_worker(gpus, tensor_parallel, alone, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    with engine_environment(
        parse_recipe(recipe_document("/m", rollout={"gpus": gpus, "tensor_parallel": tensor_parallel}))
    ):
        assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == ("0" if alone else "1")


@pytest.mark.xdist_group("vllm")
async def test_an_argument_that_vllm_refuses_is_named(tiny_model):
    """Its value is checked when the recipe is read, but only vLLM knows whether it suits the model."""
    recipe = parse_recipe(recipe_document(tiny_model, rollout={"engine": {"enable_expert_parallel": True}}))
    refusal = r"^vLLM does not start with rollout\.engine\.enable_expert_parallel: [^$]*[Nn]umber of experts"
    with pytest.raises(EngineError, match=refusal):
        await RolloutEngine.start(recipe, str(tiny_model), [3], "rollout-0")


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_engine_measures_itself_unless_told_not_to(wanted, tiny_model, monkeypatch):
    """With any logger vLLM measures every engine step, whatever disable_log_stats says."""
    from vllm.v1.engine.async_llm import AsyncLLM

    loggers = []

    def refuse(arguments, *, stat_loggers):
        loggers.append([logger.__name__ for logger in stat_loggers or ()])
        raise RuntimeError("built far enough")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", refuse)
    recipe = parse_recipe(recipe_document(tiny_model, rollout={"engine_metrics": wanted}))
    with pytest.raises(RuntimeError, match="built far enough"):
        await RolloutEngine.start(recipe, str(tiny_model), [3], "rollout-0")
    assert loggers == [["PrometheusStatLogger"] if wanted else []]


@pytest.mark.parametrize(("gpus", "compiles"), [(0, False), (1, True)])
def test_nothing_is_compiled_on_processors(gpus, compiles, monkeypatch):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    with engine_environment(parse_recipe(recipe_document("/m", rollout={"gpus": gpus}))):
        assert ("TORCH_COMPILE_DISABLE" not in os.environ) is compiles
    assert "TORCH_COMPILE_DISABLE" not in os.environ
