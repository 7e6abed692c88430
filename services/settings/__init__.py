"""Owns settings: the recipe of a run, its sections and its presets.

Must not import an engine or Redis.
"""

from services.settings.bounds import Booking, Bounds, BoundsError, bookings, load_bounds
from services.settings.data import HELD_OUT, Data, EvaluationSet, Source
from services.settings.presets import PRESETS
from services.settings.recipe import Recipe, RecipeError, load_recipe, parse_recipe
from services.settings.sampling import Starvation
from services.settings.sections import NO_TEMPLATE, Algorithm, Learner, Model, Weights

__all__ = [
    "HELD_OUT",
    "NO_TEMPLATE",
    "PRESETS",
    "Algorithm",
    "Booking",
    "Bounds",
    "BoundsError",
    "Data",
    "EvaluationSet",
    "Learner",
    "Model",
    "Recipe",
    "RecipeError",
    "Source",
    "Starvation",
    "Weights",
    "bookings",
    "load_bounds",
    "load_recipe",
    "parse_recipe",
]
