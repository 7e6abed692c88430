"""Owns the variants of the ablation: the rows of the paper's Table 1 as settings, each with one addition.

Must not hold settings that all variants share; those are in base.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.settings import Recipe, parse_recipe

BASE = Path(__file__).with_name("base.yaml")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Variant:
    """One row of Table 1. `paper`: its AIME 2024 avg@32 in percent. `adds`: the changes to the `algorithm` section."""

    name: str
    title: str
    paper: float
    adds: dict[str, Any]


# The punishment replaces the filtering, which would mask the tokens that the punishment is meant to train.
PUNISHED = {"overlong": {"filtering": False, "punishment": True}}
VARIANTS = (
    # The KL term is off in every variant, so that each changes one thing: the paper drops it before its Table 1.
    Variant("grpo", "naive GRPO", 30, {"preset": "grpo", "kl_coefficient": 0.0}),
    Variant("overlong-filtering", "+ overlong filtering", 36, {"overlong": {"filtering": True}}),
    Variant("clip-higher", "+ clip-higher", 38, {"clipping": "clip_higher", "clip_high": 0.28}),
    Variant("soft-punishment", "+ soft overlong punishment", 41, PUNISHED),
    Variant("token-loss", "+ token-level loss", 42, {"reduction": "token"}),
    Variant("dynamic-sampling", "+ dynamic sampling (DAPO)", 50, {"dynamic_sampling": {"enabled": True}}),
)


def recipe(variant: Variant, seed: int) -> Recipe:
    """The recipe of one variant and seed. The seed changes the sampling, not the tasks."""
    document = yaml.safe_load(BASE.read_text())
    algorithm = document["algorithm"]
    for step in VARIANTS[: VARIANTS.index(variant) + 1]:
        overlong = algorithm.get("overlong", {}) | step.adds.get("overlong", {})
        algorithm |= step.adds | {"overlong": overlong}
    return parse_recipe(document | {"name": f"ablation-{variant.name}-{seed}", "seed": seed})
