"""The values that each preset sets in a minimal recipe are those that the papers and the script state."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from services.settings import PRESETS, load_recipe, parse_recipe

# DAPO, arXiv 2503.14476: section 4.1 and Eq. 8 to 13.
PAPER: dict[str, Any] = {
    "algorithm.reward": "verdict",
    "algorithm.group_size": 16,
    "algorithm.ratio": "token",
    "algorithm.clipping": "clip_higher",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.dual_clip": None,
    "algorithm.reduction": "token",
    "algorithm.advantage": "group_std",
    "algorithm.proximal": "recomputed",
    "algorithm.correction": "auto",
    "algorithm.kl_coefficient": 0.0,
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.overlong.filtering": False,
    "algorithm.overlong.punishment": True,
    "algorithm.overlong.shape": "paper",
    "algorithm.overlong.factor": 1.0,
    "algorithm.overlong.cache": None,
    "algorithm.dynamic_sampling.enabled": True,
    "algorithm.dynamic_sampling.refill": "continuous",
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "learner.learning_rate": 1e-6,
    "learner.warmup_rollout_steps": 20,
    "learner.weight_decay": 0.0,
    "learner.gradient_clip": 1.0,
    "limits.max_staleness": 1,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 0.7,
}
# verl, run_dapo_qwen2.5_32b.sh: its departures from the paper.
SCRIPT: dict[str, Any] = PAPER | {
    "algorithm.dual_clip": 10.0,
    "algorithm.correction": "none",
    "algorithm.overlong.shape": "published",
    "algorithm.dynamic_sampling.refill": "generation_batches",
    "algorithm.dynamic_sampling.generation_batch_factor": 3,
    "algorithm.dynamic_sampling.max_generation_batches": 10,
    "learner.warmup_rollout_steps": 10,
    "learner.weight_decay": 0.1,
    "limits.max_staleness": 0,
}
# DeepSeekMath, arXiv 2402.03300 Eq. 3, with DeepSeek-R1-Zero's learning rate and KL coefficient.
GRPO: dict[str, Any] = PAPER | {
    "algorithm.clipping": "symmetric",
    "algorithm.clip_high": 0.2,
    "algorithm.reduction": "sample",
    "algorithm.kl_coefficient": 0.001,
    "algorithm.overlong.punishment": False,
    "algorithm.dynamic_sampling.enabled": False,
    "learner.learning_rate": 3e-6,
    "learner.warmup_rollout_steps": 0,
}
# PPO, arXiv 1707.06347: Eq. 7, 9 and 11, 6.1, table 3; TRL's trainer for language models.
PPO: dict[str, Any] = PAPER | {
    "algorithm.group_size": 1,
    "algorithm.clipping": "symmetric",
    "algorithm.clip_high": 0.2,
    "algorithm.advantage": "gae",
    "algorithm.value.discount": 1.0,
    "algorithm.value.gae_lambda": 0.95,
    "algorithm.value.whiten": True,
    "algorithm.value.clip": 0.2,
    "algorithm.value.coefficient": 0.1,
    "algorithm.value.learning_rate": 1e-5,
    "algorithm.overlong.punishment": False,
    "algorithm.dynamic_sampling.enabled": False,
    "learner.warmup_rollout_steps": 0,
}
# Dr. GRPO, arXiv 2503.20783: section 3.2 and Table 6.
DR_GRPO: dict[str, Any] = PAPER | {
    "algorithm.group_size": 8,
    "algorithm.clipping": "symmetric",
    "algorithm.clip_high": 0.2,
    "algorithm.reduction": "constant_length",
    "algorithm.advantage": "group_mean",
    "algorithm.overlong.punishment": False,
    "algorithm.dynamic_sampling.enabled": False,
    "learner.warmup_rollout_steps": 0,
}
# GSPO, arXiv 2507.18071: Eq. 5 to 7, section 5.1.
GSPO: dict[str, Any] = PAPER | {
    "algorithm.ratio": "sequence",
    "algorithm.clip_low": 3e-4,
    "algorithm.clip_high": 4e-4,
    "algorithm.reduction": "sample",
    "algorithm.overlong.punishment": False,
    "algorithm.dynamic_sampling.enabled": False,
    "learner.warmup_rollout_steps": 0,
}
# MiniMax-M1, arXiv 2506.13585: section 3.1. It states no upper bound of the weight.
CISPO: dict[str, Any] = PAPER | {
    "algorithm.clipping": "cispo",
    "algorithm.clip_low": 1.0,
    "algorithm.clip_high": 4.0,
}
STATED = {
    "dapo": PAPER,
    "dapo-verl": SCRIPT,
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "ppo": PPO,
}
SOURCES = {
    "dapo": "DAPO 4.1, Eq. 8 to 13",
    "dapo-verl": "run_dapo_qwen2.5_32b.sh",
    "grpo": "DeepSeekMath Eq. 3",
    "dr-grpo": "Dr. GRPO 3.2, Table 6",
    "gspo": "GSPO Eq. 5 to 7, 5.1",
    "cispo": "MiniMax-M1 3.1",
    "ppo": "PPO Eq. 7 to 11",
}
CASES = [
    pytest.param(name, path, value, marks=pytest.mark.conformance(formula=SOURCES[name], setting=f"preset = {name}"))
    for name, stated in STATED.items()
    for path, value in stated.items()
]
RECIPES = Path(__file__).parents[2] / "deploy/recipes"


def _value(recipe: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), recipe)


@pytest.mark.parametrize(("name", "path", "expected"), CASES)
def test_a_preset_has_the_values_of_its_source(name: str, path: str, expected: Any) -> None:
    bare = {
        "name": "bare",
        "model": {"path": "/m"},
        "algorithm": {"preset": name},
        "limits": {"rollout_steps": 1, "max_inflight_groups": 1000},
    }
    assert _value(parse_recipe(bare), path) == expected


@pytest.mark.parametrize(("name", "correction"), [("gspo", "truncated_is"), ("cispo", "truncated_is")])
@pytest.mark.conformance(formula="auto: truncated IS above staleness 0, else none", setting="correction = auto")
def test_presets_of_other_ratios_are_corrected(name: str, correction: str) -> None:
    document: dict[str, Any] = {"name": "bare", "model": {"path": "/m"}, "algorithm": {"preset": name}}
    limits: dict[str, Any] = {"rollout_steps": 1, "max_inflight_groups": 1000}
    assert parse_recipe(document | {"limits": limits}).correction == correction
    assert parse_recipe(document | {"limits": limits | {"max_staleness": 0}}).correction == "none"
    document["algorithm"]["proximal"] = "behaviour"
    assert parse_recipe(document | {"limits": limits}).correction == "none"


@pytest.mark.conformance(formula="every value has a source", setting="algorithm.preset")
def test_every_value_of_a_preset_is_checked_here() -> None:
    assert {name: set(settings) for name, settings in PRESETS.items()} == {
        name: set(stated) for name, stated in STATED.items()
    }


@pytest.mark.conformance(
    formula="512 x 16, 16 updates, 16384 + 4096 tokens, avg@32 (DAPO 4.1)", setting="qwen2.5-32b-dapo"
)
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("limits.groups_per_step", 512),
        ("algorithm.group_size", 16),
        ("learner.mini_batch_groups", 32),
        ("rollout.max_new_tokens", 20480),
        ("overlong_cache", 4096),
        ("data.max_prompt_tokens", 2048),
        ("evaluation.samples", 32),
        ("evaluation.temperature", 1.0),
        ("evaluation.top_p", 0.7),
        ("learner.learning_rate", 1e-6),
        ("learner.warmup_rollout_steps", 20),
    ],
)
def test_the_recipe_of_the_paper(path: str, expected: float) -> None:
    assert _value(load_recipe(RECIPES / "qwen2.5-32b-dapo.yaml"), path) == expected
