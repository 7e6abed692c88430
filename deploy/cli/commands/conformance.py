"""Owns `penstock conformance`: it runs the checkout's conformance suite and prints the results as a table.

Must not check anything itself; the tests marked `conformance` do, most of them in tests/conformance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from penstock_client.cli.commands.arguments import OwnJsonOption
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import console, print_json, print_line

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
TESTS = Path("tests")
SUITE = TESTS / "conformance"
DEADLINE_S = 3600
STYLES = {"passed": "green", "skipped": "yellow", "failed": "bold red"}


class ConformanceRow(NamedTuple):
    """One row of the table: a formula and setting, the test function that checks them, and its cases' results."""

    formula: str
    setting: str
    test: str
    status: str


def conformance(as_json: OwnJsonOption = False) -> None:
    """Check the algorithm against the papers' formulas with hand-computed numbers; exit status 1 if a check fails.

    The table is printed on standard output, pytest's progress and failures on standard error.
    """
    _check_installed()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        status = _run_suite(rows)
        found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    passed = status == 0 and bool(found)
    if as_json:
        print_json([row._asdict() for row in table_rows(found)])
        raise typer.Exit(0 if passed else EXIT_FAILED)
    console().print(_table(table_rows(found)))
    print_line(f"{len(found)} cases: {'all passed' if passed else 'NOT all passed, see above'}")
    raise typer.Exit(0 if passed else EXIT_FAILED)


def table_rows(cases: Iterable[dict[str, Any]]) -> list[ConformanceRow]:
    """One row per (formula, setting, test function), its cases counted by status, sorted by file."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        test = case["test"].removeprefix(f"{SUITE}/").removeprefix(f"{TESTS}/").split("[")[0]
        grouped.setdefault((case["formula"], case["setting"], test), []).append(case["status"])
    rows = [ConformanceRow(*key, _status(statuses)) for key, statuses in grouped.items()]
    return sorted(rows, key=lambda row: (row.test.split("::")[0], row.setting))


def _status(statuses: list[str]) -> str:
    """`passed (4)`, or each status with its count, worst first."""
    counts = {name: statuses.count(name) for name in reversed(STYLES) if name in statuses}
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _check_installed() -> None:
    import importlib.util

    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"conformance: {' and '.join(missing)} not installed; install the `dev` extra (`make install` does)")
    if not (ROOT / SUITE / "rows.py").exists():
        fail(f"conformance: {ROOT / SUITE} is missing; the suite runs from a checkout of the repository")


def _run_suite(rows: Path) -> int:
    plugin = ("-p", "tests.conformance.rows", "--rows", str(rows))
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-m", "conformance", str(TESTS)]
    try:
        return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=DEADLINE_S, check=False).returncode
    except subprocess.TimeoutExpired:
        fail(f"conformance: the suite took longer than {DEADLINE_S} s")


def _table(rows: list[ConformanceRow]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Conformance", title_justify="left")
    for heading in ("paper formula", "setting", "test", "status"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        worst = row.status.split(" ")[0]
        table.add_row(*(Text(cell) for cell in row[:3]), Text(row.status, style=STYLES[worst]))
    return table
