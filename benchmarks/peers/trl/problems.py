"""Owns the problems of the training comparison with TRL: the demo recipe's own splits and settings, as two JSON files.

Must not import TRL. Runs in the project's environment: `python -m benchmarks.peers.trl.problems FOLDER`.

FOLDER/train.json holds `settings` (those of the recipe that TRL's trainer gets) and `problems`, FOLDER/held-out.json
holds `sampling` (that of the recipe's evaluation) and `problems`. A problem is `id`, `messages` and `reference`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.contracts import Prompt
from services.sampler.data import load_splits
from services.settings import Recipe, load_recipe

RECIPE = Path(__file__).parents[3] / "deploy" / "recipes" / "smollm2-chain-sum.yaml"
TRAIN, HELD_OUT = "train.json", "held-out.json"


def main(arguments: Sequence[str]) -> int:
    """Write both files and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where train.json and held-out.json are written")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the recipe (that of the demo)")
    given = parser.parse_args(arguments)
    for path in write_problems(given.recipe, given.folder):
        print(path)
    return 0


def write_problems(recipe: Path, folder: Path) -> tuple[Path, Path]:
    """Write the problems of `recipe` to `folder` and return both paths. Raises RecipeError, DataError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = documents(load_recipe(recipe))
    paths = folder / TRAIN, folder / HELD_OUT
    for path, document in zip(paths, (train, held_out), strict=True):
        path.write_text(json.dumps(document, indent=1) + "\n")
    return paths


def documents(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of both files. Raises DataError; ValueError for a verifier that TRL's side cannot call."""
    splits = load_splits(recipe.data, recipe.evaluation.sets)
    if others := {prompt.verifier for prompt in (*splits.train, *splits.held_out)} - {"reasoning-gym"}:
        raise ValueError(f"data.source: {recipe.data.source!r} is not valid: expected 'reasoning-gym', not {others}")
    evaluation = recipe.evaluation
    sampling = {
        "samples": evaluation.samples,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_new_tokens": recipe.evaluation_new_tokens,
    }
    train = {"settings": settings_of(recipe), "problems": [problem(prompt) for prompt in splits.train]}
    return train, {"sampling": sampling, "problems": [problem(prompt) for prompt in splits.held_out]}


def problem(prompt: Prompt) -> dict[str, Any]:
    """A prompt as both sides read it."""
    return {"id": prompt.id, "messages": list(prompt.messages), "reference": prompt.reference}


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The settings that both sides share; benchmarks.peers.trl.configuration gives them TRL's names."""
    algorithm, rollout, learner, limits = recipe.algorithm, recipe.rollout, recipe.learner, recipe.limits
    return {
        "groups_per_step": limits.groups_per_step,
        "group_size": algorithm.group_size,
        "updates_per_step": limits.groups_per_step // learner.mini_batch_groups,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "kl_coefficient": algorithm.kl_coefficient,
        "overlong_cache": recipe.overlong_cache if algorithm.overlong.punishment else 0,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "max_new_tokens": rollout.max_new_tokens,
        "learning_rate": learner.learning_rate,
        "warmup_rollout_steps": learner.warmup_rollout_steps,
        "weight_decay": learner.weight_decay,
        "gradient_clip": learner.gradient_clip,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
