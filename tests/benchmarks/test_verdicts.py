"""The benchmark of verdicts judges the same responses with each program, half of them right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.verifier.verdicts import speed


def test_generated_problems_are_judged_by_each_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["--problems", "4", "--repeats", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "verdicts.json").read_text())
    half = [4 * speed.RESPONSES // 2]
    assert found["details"]["correct"] == {
        name: dict.fromkeys(speed.PROGRAMS, half) for name in ("formulas", "numbers")
    }
    assert "math / math-verify, formulas" in capsys.readouterr().out


def test_problems_are_read_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--data", str(tmp_path)])
    assert "has none of math500.jsonl, gsm8k_test.jsonl" in capsys.readouterr().err
    (tmp_path / "gsm8k_test.jsonl").write_text('{"answer": "so #### 4"}\n{"answer": "#### 5"}\n')
    sets = speed.sets_of(tmp_path, 2)
    assert [gold for _, gold in sets["gsm8k_test"][:: speed.RESPONSES]] == ["4", "5"]
