"""Owns settings: the recipe of a run, its sections and its presets.

Must not import an engine or Redis.
"""

from services.settings.presets import PRESETS
from services.settings.recipe import Recipe, RecipeError, load_recipe, parse_recipe
from services.settings.sections import (
    HELD_OUT,
    NO_TEMPLATE,
    Algorithm,
    Data,
    EvaluationSet,
    Learner,
    Model,
    Source,
    Weights,
)

__all__ = [
    "HELD_OUT",
    "NO_TEMPLATE",
    "PRESETS",
    "Algorithm",
    "Data",
    "EvaluationSet",
    "Learner",
    "Model",
    "Recipe",
    "RecipeError",
    "Source",
    "Weights",
    "load_recipe",
    "parse_recipe",
]
