"""Owns settings: the recipe of a run, its sections and its presets.

Must not import an engine or Redis.
"""

from services.settings.algorithm.sampling import StarvationSettings
from services.settings.algorithm.section import AlgorithmSettings
from services.settings.algorithm.value import ValueSettings
from services.settings.cluster_limits import (
    ClusterLimits,
    ClusterLimitsError,
    ResourceRequest,
    check_reward_limits,
    load_cluster_limits,
    resource_requests,
)
from services.settings.data import HELD_OUT, DataSettings, EvaluationSet, SourceSettings
from services.settings.operator.expiry import ExpiryError, load_expiry
from services.settings.operator.prices import Prices, PricesError, load_prices
from services.settings.presets import PRESETS
from services.settings.recipe import Recipe, RecipeError, check_files, check_trackers, load_recipe, parse_recipe
from services.settings.sections import (
    NO_TEMPLATE,
    LearnerSettings,
    LimitsSettings,
    ModelSettings,
    WeightsSettings,
)

__all__ = [
    "HELD_OUT",
    "NO_TEMPLATE",
    "PRESETS",
    "AlgorithmSettings",
    "ClusterLimits",
    "ClusterLimitsError",
    "DataSettings",
    "EvaluationSet",
    "ExpiryError",
    "LearnerSettings",
    "LimitsSettings",
    "ModelSettings",
    "Prices",
    "PricesError",
    "Recipe",
    "RecipeError",
    "ResourceRequest",
    "SourceSettings",
    "StarvationSettings",
    "ValueSettings",
    "WeightsSettings",
    "check_files",
    "check_reward_limits",
    "check_trackers",
    "load_cluster_limits",
    "load_expiry",
    "load_prices",
    "load_recipe",
    "parse_recipe",
    "resource_requests",
]
