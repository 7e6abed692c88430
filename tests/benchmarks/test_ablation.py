"""The variants of the ablation: each changes only the setting in its name; the last is the paper's algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.ablation import report
from benchmarks.studies.ablation.run import KEPT
from benchmarks.studies.ablation.variants import SEEDS, VARIANTS, recipe
from services.settings import PRESETS


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def settings(index: int, seed: int = 0) -> dict[str, Any]:
    return flat(recipe(VARIANTS[index], seed).model_dump(mode="json"))


def test_each_variant_changes_one_setting() -> None:
    changed = []
    for index in range(1, len(VARIANTS)):
        before, after = settings(index - 1), settings(index)
        changed.append({name for name in after if after[name] != before[name]} - {"name"})
    overlong = "algorithm.overlong."
    assert changed == [
        {f"{overlong}filtering"},
        {"algorithm.clipping", "algorithm.clip_high"},
        {f"{overlong}filtering", f"{overlong}punishment"},
        {"algorithm.reduction"},
        {"algorithm.dynamic_sampling.enabled"},
    ]


def test_the_last_variant_is_dapo() -> None:
    scale = {
        "algorithm.group_size",
        "algorithm.overlong.cache",
        "learner.learning_rate",
        "learner.warmup_rollout_steps",
    }
    last = settings(-1)
    assert {path: last[path] for path in PRESETS["dapo"] if path not in scale} == {
        path: preset.value for path, preset in PRESETS["dapo"].items() if path not in scale
    }


def test_seeds_of_a_variant_differ_only_in_the_seed() -> None:
    first, second = settings(0, SEEDS[0]), settings(0, SEEDS[1])
    assert {name for name in first if first[name] != second[name]} == {"seed", "name"}
    assert len(SEEDS) >= 3


def result(variant: str, seed: int, after: float) -> dict[str, Any]:
    """Eight steps of 1,200 tokens, each metric a tenth of the step. In the second step nothing was judged."""
    steps = [
        dict.fromkeys(KEPT, step / 10) | {"step": step, "response_tokens": 1200.0, "response_length": 2.0 * step}
        for step in range(1, 9)
    ]
    steps[1] = dict.fromkeys(KEPT) | {"step": 2, "entropy": 0.4, "response_tokens": 0.0}
    evaluation = {
        "standard_error": 0.1,
        "pass_at": [{"k": 4, "value": 0.75}],
        "majority": 0.5,
        "response_length": 12.0,
        "truncated_share": 0.25,
    }
    evaluations = [
        evaluation | {"name": name, "version": version, "accuracy": accuracy}
        for name, version, accuracy in (("before", 0, 0.25), ("after", 8, after))
    ]
    summary = {"optimizer_steps": 6, "wall_seconds": 60.0}
    return {"variant": variant, "seed": seed, "steps": steps, "evaluations": evaluations, "summary": summary}


def test_the_report_accepts_steps_without_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    for variant, accuracies in ((VARIANTS[0], (0.5, 0.75, 0.25)), (VARIANTS[1], (0.75, 0.75, 0.75))):
        (tmp_path / variant.name).mkdir()
        for seed, after in enumerate(accuracies):
            (tmp_path / variant.name / f"{seed}.json").write_text(json.dumps(result(variant.name, seed, after)))
    results = report.load()
    report.write_tables(results)
    report.draw(results)
    lines = report.markdown(results).splitlines()
    # 50, 75 and 25: mean 50, standard error 25 / sqrt(3) = 14.4
    assert [part.strip() for part in lines[2].split("|")][2:5] == ["3", "50.0 ± 14.4", "-"]
    assert [part.strip() for part in lines[3].split("|")][3:5] == ["75.0 ± 0.0", "+25.0 ± 14.4"]
    assert len(lines) == 4, "variants without a result must not be listed"
    # Steps 7 and 8 are after 7,000 tokens.
    assert lines[2].split("|")[6].strip() == "75.0 ± 0.0"
    [row] = [line for line in report.midway(results).splitlines() if line.startswith(f"| {VARIANTS[1].title} |")]
    # 5,000 tokens are a sixth of the way from the end of step 5 (4,800 tokens) to the end of step 6.
    middle = "0.517 ± 0.000"
    expected = [middle, "10.33 ± 0.00", *([middle] * 4), "70.0 ± 0.0"]
    assert [part.strip() for part in row.split("|")][2:-1] == expected
    assert (tmp_path / "final.csv").read_text().count("\n") == 7
    assert (tmp_path / "curves.csv").read_text().count("\n") == 49
    assert (tmp_path / "ablation.png").stat().st_size > 10_000
    assert (tmp_path / "ablation-curves.png").stat().st_size > 10_000


def test_spread_is_the_standard_error_of_the_mean() -> None:
    mean, error = report.spread([1.0, 2.0, 6.0])
    assert mean == 3.0
    assert abs(error - (7.0 / 3.0) ** 0.5) < 1e-12  # s^2 = (4 + 1 + 9) / 2
    assert report.spread([5.0]) == (5.0, 0.0)
