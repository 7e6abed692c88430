"""The chart's README from the comments of its values."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from deploy.kubernetes.chart_readme import CHART, ChartValue, UndocumentedError, main, render, values

TEXT = """
# -- How many
replicas: 2
group:
  # -- The first line
  # and its second
  size: 1Gi
  # Not of the table.
  # -- A map of the user's
  labels:
    app: x
  # -- A list | with a bar
  names: [a, b]
"""


def test_reads_paths_defaults_and_comments() -> None:
    assert values(TEXT) == [
        ChartValue("replicas", "2", "How many"),
        ChartValue("group.size", '"1Gi"', "The first line and its second"),
        ChartValue("group.labels", '{"app": "x"}', "A map of the user's"),
        ChartValue("group.names", '["a", "b"]', "A list | with a bar"),
    ]


def test_names_every_value_without_a_comment() -> None:
    with pytest.raises(UndocumentedError, match=r"(?s)a: no `# --` comment.*b\.c: no"):
        values("a: 1\nb:\n  # a remark\n  c: 2\n")


def test_renders_a_table_per_section() -> None:
    readme = render("# Head\n\n", values(TEXT))
    assert readme.startswith("# Head\n\n## Values\n\n### General\n\n| value | default | meaning |\n|---|---|---|\n")
    assert "### group" in readme
    assert '| `group.names` | `["a", "b"]` | A list \\| with a bar |' in readme


def test_check_finds_an_outdated_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README.head.md", "values.yaml"):
        shutil.copy(CHART / name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["chart_readme", "--chart", str(tmp_path), "--check"])
    assert main() == 1
    assert "stale" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["chart_readme", "--chart", str(tmp_path)])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", ["chart_readme", "--chart", str(tmp_path), "--check"])
    assert main() == 0


def test_the_charts_readme_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chart_readme", "--check"])
    assert main() == 0
