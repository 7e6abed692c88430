"""Owns the rows of the paper's Table 1 as settings: each adds one thing to the row above.

Must not hold anything that is the same in all rows; base.yaml does.
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
class Row:
    """`paper`: AIME 2024 avg@32 of Table 1 in percent; `adds`: what changes in the `algorithm` section."""

    name: str
    title: str
    paper: float
    adds: dict[str, Any]


ROWS = (
    # The KL term is off in every row, so that each row changes one thing: the paper drops it before its Table 1.
    Row("grpo", "naive GRPO", 30, {"preset": "grpo", "kl_coefficient": 0.0}),
    Row("overlong-filtering", "+ overlong filtering", 36, {"overlong": {"filtering": True}}),
    Row("clip-higher", "+ clip-higher", 38, {"clipping": "clip_higher", "clip_high": 0.28}),
    # The punishment takes the filtering's place: both at once would mask the very tokens it is meant to teach.
    Row("soft-punishment", "+ soft overlong punishment", 41,
        {"overlong": {"filtering": False, "punishment": True}}),
    Row("token-loss", "+ token-level loss", 42, {"reduction": "token"}),
    Row("dynamic-sampling", "+ dynamic sampling (DAPO)", 50, {"dynamic_sampling": {"enabled": True}}),
)  # fmt: skip


def recipe(row: Row, seed: int) -> Recipe:
    """The run of one row and seed; the seed changes what is drawn, not the tasks."""
    document = yaml.safe_load(BASE.read_text())
    algorithm = document["algorithm"]
    for one in ROWS[: ROWS.index(row) + 1]:
        overlong = algorithm.get("overlong", {}) | one.adds.get("overlong", {})
        algorithm |= one.adds | {"overlong": overlong}
    return parse_recipe(document | {"name": f"ablation-{row.name}-{seed}", "seed": seed})
