"""What the engine is told, where its own default would bend the policy without a word."""

import pytest

from rollout.engine import _engine_arguments
from services.settings import parse_recipe
from tests.harness.small_run import recipe_document


def arguments(**rollout):
    return _engine_arguments(parse_recipe(recipe_document("/m", rollout=rollout)), "/m", "rollout-0", 16)


@pytest.mark.conformance(formula="no CUDA graphs where they are in doubt", setting="rollout.eager")
@pytest.mark.parametrize(("eager", "gpus", "expected"), [(False, 1, False), (True, 1, True), (False, 0, True)])
def test_eager(eager, gpus, expected):
    assert arguments(eager=eager, gpus=gpus)["enforce_eager"] is expected


@pytest.mark.conformance(formula="behaviour log-probs: of the distribution drawn from", setting="rollout")
def test_log_probs_and_sampling_are_the_recipe_s_alone():
    found = arguments()
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["generation_config"] == "vllm"
