"""`penstock conformance` on small suites: the table, the exit status, and the errors when it cannot run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deploy.cli.commands import conformance
from deploy.cli.main import app

ROOT = Path(__file__).parents[2]
HEAD = "import pytest\nmark = pytest.mark.conformance(formula='1 + 1 = 2', setting='sums')\n"
PASSES = f"{HEAD}@mark\n@pytest.mark.parametrize('n', [1, 2])\ndef test_sums(n):\n    assert n + n == 2 * n\n"
FAILS = f"{PASSES}@mark\ndef test_wrong():\n    assert 1 + 1 == 3\n"
BREAKS = f"{PASSES}@mark\ndef test_setup(no_such_fixture):\n    pass\n"


def suite(folder: Path, text: str) -> Path:
    """A checkout of one test file, with the real plugin and settings."""
    tests = folder / "tests/conformance"
    tests.mkdir(parents=True)
    for name in ("rows.py", "conftest.py"):
        shutil.copy(ROOT / "tests/conformance" / name, tests)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tests / "test_one.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        (PASSES, 0, ["1 + 1 = 2", "sums", "test_one.py::test_sums", "passed (2)", "2 cases: all passed"]),
        (FAILS, 1, ["test_one.py::test_wrong", "failed (1)", "passed (2)", "3 cases: NOT all passed"]),
        (BREAKS, 1, ["test_one.py::test_setup", "failed (1)", "3 cases: NOT all passed"]),
        (f"{PASSES}raise RuntimeError\n", 1, ["0 cases: NOT all passed"]),
        (f"{PASSES}def test_unmarked():\n    pass\n", 1, ["0 cases: NOT all passed"]),
    ],
    ids=["passes", "fails", "breaks in set-up", "cannot be collected", "has no formula"],
)
def test_the_table_and_the_exit_status(
    text: str,
    status: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(conformance, "ROOT", suite(tmp_path, text))
    with pytest.raises(typer.Exit) as ended:
        conformance.conformance()
    printed = capfd.readouterr()
    assert ended.value.exit_code == status, printed.err
    for part in expected:
        assert part in printed.out


def test_cases_of_one_test_are_counted_by_status() -> None:
    case = {"formula": "f", "setting": "s", "test": "tests/conformance/test_a.py::test_x[1]"}
    found = conformance.table_rows(
        [
            {**case, "status": "passed"},
            {**case, "status": "failed"},
            {**case, "status": "passed"},
            {**case, "setting": "r", "status": "skipped"},
        ]
    )
    assert found == [
        ("f", "r", "test_a.py::test_x", "skipped (1)"),
        ("f", "s", "test_a.py::test_x", "failed (1), passed (2)"),
    ]


def test_a_missing_checkout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "ROOT", tmp_path)
    result = CliRunner().invoke(app, ["conformance"])
    assert result.exit_code == 2
    assert "tests/conformance is missing; the suite runs from a checkout" in result.stderr


def test_missing_test_packages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "hypothesis" else object())
    result = CliRunner().invoke(app, ["conformance"])
    assert result.exit_code == 2
    assert "hypothesis not installed; install the `dev` extra" in result.stderr
