"""Recipes that no devices can run are refused, and each error names both settings."""

from pathlib import Path

import pytest

from services.settings import Recipe, RecipeError, load_recipe, parse_recipe
from tests.harness.small_run import recipe_document

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
NCCL = {"weights": {"backend": "nccl"}}
ON_GPUS = {"rollout": {"gpus": 1}, "learner": {"gpus": 1}}
BUNDLED = sorted((Path(__file__).parents[3] / "deploy/recipes").glob("*.yaml"))


def recipe(**sections) -> Recipe:
    return parse_recipe(recipe_document("/model", **sections))


def tensor_parallel(workers, gpus, **architecture):
    model = {"architecture": QWEN_7B | architecture}
    return {"model": model, "rollout": {"tensor_parallel": workers, "gpus": gpus}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"rollout": {"tensor_parallel": 4, "gpus": 1}},
            ["rollout.gpus: 1.0 is not valid: expected 0 (on CPU), 4 (rollout.tensor_parallel)"],
        ),
        ({"rollout": {"tensor_parallel": 2, "gpus": 0.5}}, ["rollout.gpus: 0.5 is not valid", "2 (rollout.tensor_"]),
        (
            {"rollout": {"gpus": 2}},
            ["rollout.gpus: 2.0 is not valid", "1 (rollout.tensor_parallel) or a share below 1"],
        ),
        (
            {"rollout": {"threads": 3, "max_threads": 2}},
            ["rollout.max_threads: 2 is not valid: expected rollout.threads = 3 or more, or null"],
        ),
        (
            {"rollout": {"max_threads": 2, "tensor_parallel": 2}},
            ["rollout.max_threads: 2 is not valid: expected null with rollout.gpus = 0, rollout.tensor_parallel = 2"],
        ),
        (
            {"rollout": {"max_threads": 2, "gpus": 1}},
            ["rollout.max_threads: 2 is not valid: expected null with rollout.gpus = 1, rollout.tensor_parallel = 1"],
        ),
        ({"rollout": {"gpus": 1.5}}, ["rollout.gpus: 1.5 is not valid", "1 (rollout.tensor_parallel)"]),
        (
            {"learner": {"gpus": 2}},
            ["learner.gpus: 2.0 is not valid: expected 0 (on CPU) or 1", "learner.ranks = 1 sets"],
        ),
        (
            {"learner": {"gpus": 0.5, "ranks": 2}},
            ["learner.gpus: 0.5 is not valid: expected 0 (on CPU) or 1 with learner.ranks = 2"],
        ),
        (
            {"rollout": {"gpus": 0.00005}},
            ["rollout.gpus: 5e-05 is not valid", "or a share below 1, at least 0.0001"],
        ),
        ({"learner": {"gpus": 0.00005}}, ["learner.gpus: 5e-05 is not valid", "or a share of at least 0.0001"]),
        (NCCL, ["weights.backend: 'nccl' is not valid: expected 'gloo' with rollout.gpus = 0 and learner.gpus = 0"]),
        (
            {**NCCL, "rollout": {"gpus": 1}},
            ["weights.backend: 'nccl' is not valid: expected 'gloo' with learner.gpus = 0"],
        ),
        (
            {**NCCL, "learner": {"gpus": 1}},
            ["weights.backend: 'nccl' is not valid: expected 'gloo' with rollout.gpus = 0"],
        ),
        (
            {**NCCL, "rollout": {"gpus": 0.5}, "learner": {"gpus": 0.5}},
            ["rollout.gpus: 0.5 is not valid: expected 1 with weights.backend = 'nccl'", "(learner.gpus = 0.5)"],
        ),
        (
            {**NCCL, "rollout": {"gpus": 0.5, "replicas": 2}, "learner": {"gpus": 1}},
            ["rollout.gpus: 0.5 is not valid: expected 1 with weights.backend = 'nccl'", "another"],
        ),
        (
            tensor_parallel(8, 8),
            [
                "rollout.tensor_parallel: 8 is not valid: expected a divisor of "
                "model.architecture.num_attention_heads = 28"
            ],
        ),
        # On CPU too: the shapes are the same.
        (tensor_parallel(3, 0, num_attention_heads=27), ["key_value_heads = 4", "intermediate_size = 18944"]),
        (
            tensor_parallel(6, 6, num_attention_heads=24, intermediate_size=18),
            ["rollout.tensor_parallel: 6 is not valid: expected a divisor or a multiple of", "key_value_heads = 4"],
        ),
        (
            tensor_parallel(3, 3, num_attention_heads=27, num_key_value_heads=3, intermediate_size=18, vocab_size=300),
            ["model.architecture.vocab_size = 320, padded to a multiple of 64"],
        ),
    ],
)
def test_impossible_devices_name_both_settings(sections, expected):
    with pytest.raises(RecipeError) as caught:
        recipe(**sections)
    for part in expected:
        assert part in str(caught.value)


def test_each_impossible_setting_has_its_own_line():
    with pytest.raises(RecipeError) as caught:
        recipe(rollout={"tensor_parallel": 4, "gpus": 1}, learner={"gpus": 2})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["rollout.gpus", "learner.gpus"]


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"tensor_parallel": 2}},  # two processes on the CPU, as vLLM runs them
        {"rollout": {"tensor_parallel": 4, "gpus": 4}},
        {"rollout": {"gpus": 0.5, "replicas": 2}, "learner": {"gpus": 0.5}},  # Gloo sends over TCP
        {**NCCL, **ON_GPUS},
        {**NCCL, "rollout": {"gpus": 1}, "learner": {"gpus": 0.5}},
        {**NCCL, "rollout": {"gpus": 2, "tensor_parallel": 2}, "learner": {"gpus": 1, "ranks": 8}},
        tensor_parallel(4, 4),
        tensor_parallel(2, 2, num_attention_heads=2, num_key_value_heads=1),
        # An evaluation has neither learner nor broadcast.
        {**NCCL, "learner": {"gpus": 2}, "limits": {"rollout_steps": 0}},
    ],
)
def test_possible_devices_are_accepted(sections):
    assert recipe(**sections).device_faults == []


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_bundled_recipes_are_possible(path):
    assert load_recipe(path).device_faults == []


def test_a_stored_recipe_of_an_earlier_release_is_read():
    """Earlier releases ran it, on one of the two GPUs."""
    stored = recipe().model_dump(mode="json")
    stored["learner"]["gpus"] = 2.0
    read = Recipe.model_validate(stored)
    assert [fault.split(":")[0] for fault in read.device_faults] == ["learner.gpus"]
