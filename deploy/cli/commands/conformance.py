"""Owns `penstock conformance`: the checkout's conformance suite, run and shown as a table.

Must not check anything itself; the tests marked `conformance` do, most of them in tests/conformance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
TESTS = Path("tests")
SUITE = TESTS / "conformance"
DEADLINE_S = 3600
OBSTACLE = 2
STYLES = {"passed": "green", "skipped": "yellow", "failed": "bold red"}


class Row(NamedTuple):
    """One line of the table: a formula and setting, the test function that checks them, and what its cases came to."""

    formula: str
    setting: str
    test: str
    status: str


def conformance() -> None:
    """Check the algorithm against the papers' formulas, by hand-computed numbers; exit status 1 if anything fails.

    The table goes to standard output; pytest's own progress and failures to standard error.
    """
    _check_installed()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        status = _run_suite(rows)
        found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    _print(table_rows(found))
    passed = status == 0 and bool(found)
    typer.echo(f"{len(found)} cases: {'all passed' if passed else 'NOT all passed, see above'}")
    raise typer.Exit(0 if passed else 1)


def table_rows(cases: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per (formula, setting, test function), its cases counted by status, sorted by file."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        test = case["test"].removeprefix(f"{SUITE}/").removeprefix(f"{TESTS}/").split("[")[0]
        grouped.setdefault((case["formula"], case["setting"], test), []).append(case["status"])
    rows = [Row(*key, _status(statuses)) for key, statuses in grouped.items()]
    return sorted(rows, key=lambda row: (row.test.split("::")[0], row.setting))


def _status(statuses: list[str]) -> str:
    """`passed (4)`, or every status with its count, the worst first."""
    counts = {name: statuses.count(name) for name in reversed(STYLES) if name in statuses}
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _check_installed() -> None:
    import importlib.util

    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        _refuse(f"{' and '.join(missing)} not installed; install the `dev` extra (`make install` does)")
    if not (ROOT / SUITE / "rows.py").exists():
        _refuse(f"{ROOT / SUITE} is missing; the suite runs from a checkout of the repository")


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"penstock: conformance: {reason}", err=True)
    raise typer.Exit(OBSTACLE)


def _run_suite(rows: Path) -> int:
    plugin = ("-p", "tests.conformance.rows", "--rows", str(rows))
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-m", "conformance", str(TESTS)]
    try:
        return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=DEADLINE_S, check=False).returncode
    except subprocess.TimeoutExpired:
        _refuse(f"the suite took more than {DEADLINE_S} s")


def _print(rows: list[Row]) -> None:
    from rich.text import Text

    from deploy.cli.console import console

    table = _table()
    for row in rows:
        worst = row.status.split(" ")[0]
        table.add_row(*(Text(cell) for cell in row[:3]), Text(row.status, style=STYLES[worst]))
    console().print(table)


def _table() -> Table:
    from rich.table import Table

    table = Table(title="Conformance", title_justify="left")
    for heading in ("paper formula", "setting", "test", "status"):
        table.add_column(heading, overflow="fold")
    return table
