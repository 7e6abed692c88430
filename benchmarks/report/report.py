"""Owns a benchmark's report: printed as a table, written as JSON and PNG. Its exit status says whether targets are met.

Must not measure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report.figures import Figure
from benchmarks.report.machine import machine
from benchmarks.report.picture import Panel, draw

FOLDER = Path("bench")


def options(name: str, method: str | None, *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that every benchmark has. `method`: the docstring of its module, which `--help` prints."""
    parser = argparse.ArgumentParser(
        prog=f"penstock bench {name}", description=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=positive, default=repeats, help=f"measurements of each part ({repeats})")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder for {name}.json and {name}.png ({FOLDER}/)")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: expected a whole number of at least 1")
    return int(text)


@dataclass
class Report:
    """The result of one benchmark.

    `figures`: in the order of the table. `panels`: those of the picture. `details`: anything else for the JSON.
    `notes`: sentences below the table.
    """

    name: str
    figures: list[Figure]
    panels: Sequence[Panel]
    details: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def missed(self) -> list[Figure]:
        """The figures outside their targets."""
        return [figure for figure in self.figures if figure.missed]

    def finish(self, folder: Path) -> int:
        """Print the table and write `NAME.json` and `NAME.png`. The exit status: 1 if a target was missed."""
        found = machine()
        print(self.table(found), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        document = {"name": self.name, "machine": found, "figures": [figure.row() for figure in self.figures]}
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(document | {"details": self.details}, indent=1) + "\n")
        draw(self.name, self.panels, path.with_suffix(".png"))
        print(f"{path} and {path.with_suffix('.png')} are written", flush=True)
        return 1 if self.missed else 0

    def table(self, found: dict[str, Any]) -> str:
        """The figures as a Markdown table, below one line on the machine `found`."""
        capped = "".join(f", {name}={value}" for name, value in found["capped by"].items())
        head = f"{found['cores']} cores, {found['processor']}{capped}, commit {found['commit']}"
        rows = ["| figure | min | median | max | target |", "|---|---|---|---|---|", *map(_row, self.figures)]
        misses = [f"MISSED: {figure.name}" for figure in self.missed]
        return "\n".join((head, "", *rows, "", *self.notes, *misses))


def _row(figure: Figure) -> str:
    unit = f" ({figure.unit})" if figure.unit else ""
    spread = (min(figure.values), figure.median, max(figure.values))
    verdict = "" if figure.target is None else f"{figure.target}: {'MISSED' if figure.missed else 'met'}"
    return f"| {figure.name}{unit} | {' | '.join(_short(value) for value in spread)} | {verdict} |"


def _short(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
