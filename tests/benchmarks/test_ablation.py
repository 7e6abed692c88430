"""The ablation's rows: each changes what its name says and nothing else; the last one is the paper's algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablation import report
from benchmarks.ablation.rows import ROWS, SEEDS, recipe
from benchmarks.ablation.run import KEPT
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
    scale = {
        "algorithm.group_size",
        "algorithm.overlong.cache",
        "learner.learning_rate",
        "learner.warmup_rollout_steps",
    }
    last = settings(-1)
    assert {path: last[path] for path in PRESETS["dapo"] if path not in scale} == {
        path: one.value for path, one in PRESETS["dapo"].items() if path not in scale
    }


def test_rows_differ_from_seed_to_seed_in_the_seed_alone() -> None:
    one, other = settings(0, SEEDS[0]), settings(0, SEEDS[1])
    assert {name for name in one if one[name] != other[name]} == {"seed", "name"}
    assert len(SEEDS) >= 3


def result(row: str, seed: int, after: float) -> dict[str, Any]:
    """A run of eight steps of 1,200 tokens, every metric a tenth of the step; in the second one nothing was judged."""
    steps = [
        dict.fromkeys(KEPT, step / 10) | {"step": step, "response_tokens": 1200.0, "response_length": 2.0 * step}
        for step in range(1, 9)
    ]
    steps[1] = dict.fromkeys(KEPT) | {"step": 2, "entropy": 0.4, "response_tokens": 0.0}
    evaluation = {
        "standard_error": 0.1, "pass_at": [{"k": 4, "value": 0.75}], "majority": 0.5, "response_length": 12.0,
        "truncated_share": 0.25,
    }  # fmt: skip
    evaluations = [
        evaluation | {"name": name, "version": version, "accuracy": accuracy}
        for name, version, accuracy in (("before", 0, 0.25), ("after", 8, after))
    ]
    summary = {"optimizer_steps": 6, "wall_seconds": 60.0}
    return {"row": row, "seed": seed, "steps": steps, "evaluations": evaluations, "summary": summary}


def test_the_report_copes_with_steps_that_report_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    for row, accuracies in ((ROWS[0], (0.5, 0.75, 0.25)), (ROWS[1], (0.75, 0.75, 0.75))):
        for seed, after in enumerate(accuracies):
            (tmp_path / f"{row.name}-{seed}.json").write_text(json.dumps(result(row.name, seed, after)))
    results = report.load()
    report.write_tables(results)
    report.draw(results)
    lines = report.markdown(results).splitlines()
    # 50, 75 and 25: mean 50, standard error 25 / sqrt(3) = 14.4
    assert [part.strip() for part in lines[2].split("|")][2:5] == ["3", "50.0 ± 14.4", "-"]
    assert [part.strip() for part in lines[3].split("|")][3:5] == ["75.0 ± 0.0", "+25.0 ± 14.4"]
    assert len(lines) == 4, "rows without a result are left out"
    # Beyond 7,000 tokens lie steps 7 and 8.
    assert lines[2].split("|")[6].strip() == "75.0 ± 0.0"
    [row] = [line for line in report.midway(results).splitlines() if line.startswith(f"| {ROWS[1].title} |")]
    # 5,000 tokens lie a sixth of the way from step 5, which ends at 4,800, to step 6.
    middle = "0.517 ± 0.000"
    assert [part.strip() for part in row.split("|")][2:-1] == [
        middle, "10.33 ± 0.00", middle, middle, middle, middle, "70.0 ± 0.0",
    ]  # fmt: skip
    assert (tmp_path / "final.csv").read_text().count("\n") == 7
    assert (tmp_path / "curves.csv").read_text().count("\n") == 49
    assert (tmp_path / "ablation.png").stat().st_size > 10_000
    assert (tmp_path / "ablation-curves.png").stat().st_size > 10_000


def test_spread_is_the_standard_error_of_the_mean() -> None:
    mean, error = report.spread([1.0, 2.0, 6.0])
    assert mean == 3.0
    assert abs(error - (7.0 / 3.0) ** 0.5) < 1e-12  # s^2 = (4 + 1 + 9) / 2
    assert report.spread([5.0]) == (5.0, 0.0)
