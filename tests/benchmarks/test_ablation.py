"""The ablation's rows: each changes what its name says and nothing else; the last one is the paper's algorithm."""

from __future__ import annotations

from typing import Any

from benchmarks.ablation import report
from benchmarks.ablation.rows import ROWS, SEEDS, recipe
from services.settings import PRESETS


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def settings(row: int, seed: int = 0) -> dict[str, Any]:
    return flat(recipe(ROWS[row], seed).model_dump(mode="json"))


def test_each_row_changes_one_thing() -> None:
    changed = []
    for row in range(1, len(ROWS)):
        before, after = settings(row - 1), settings(row)
        changed.append({name for name in after if after[name] != before[name]} - {"name"})
    overlong = "algorithm.overlong."
    assert changed == [
        {f"{overlong}filtering"},
        {"algorithm.clipping", "algorithm.clip_high"},
        {f"{overlong}filtering", f"{overlong}punishment"},
        {"algorithm.reduction"},
        {"algorithm.dynamic_sampling.enabled"},
    ]


def test_the_last_row_is_dapo() -> None:
    scale = {"algorithm.group_size", "learner.learning_rate", "learner.warmup_rollout_steps"}
    last = settings(-1)
    assert {path: last[path] for path in PRESETS["dapo"] if path not in scale} == {
        path: one.value for path, one in PRESETS["dapo"].items() if path not in scale
    }


def test_rows_differ_from_seed_to_seed_in_the_seed_alone() -> None:
    one, other = settings(0, SEEDS[0]), settings(0, SEEDS[1])
    assert {name for name in one if one[name] != other[name]} == {"seed", "name"}
    assert len(SEEDS) >= 3


def test_spread_is_the_standard_error_of_the_mean() -> None:
    mean, error = report.spread([1.0, 2.0, 6.0])
    assert mean == 3.0
    assert abs(error - (7.0 / 3.0) ** 0.5) < 1e-12  # s^2 = (4 + 1 + 9) / 2
    assert report.spread([5.0]) == (5.0, 0.0)
