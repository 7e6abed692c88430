"""Owns the chart's README: its hand-written head, then a table of all values from the comments in values.yaml.

Must not know what a value means; the comment above it explains it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

CHART = Path(__file__).parents[2] / "helm" / "penstock"
MARK = "# -- "
GENERAL = "General"


class UndocumentedError(ValueError):
    """Values without a comment; one line each."""


class ChartValue(NamedTuple):
    """A row of the table: the value's path, its default as JSON, and the text of its comment."""

    path: str
    default: str
    meaning: str


def values(text: str) -> list[ChartValue]:
    """All values of a values.yaml, in its order. Raises UndocumentedError with those that have no `# --` comment."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "values.yaml is a mapping"
    rows = list(_rows(root, "", text.splitlines()))
    if missing := [f"{row.path}: no `{MARK.strip()}` comment above it" for row in rows if not row.meaning]:
        raise UndocumentedError("\n".join(missing))
    return rows


def _rows(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[ChartValue]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        meaning = _comment(lines, key.start_mark.line)
        # A comment above a mapping documents the whole mapping: the user chooses its keys.
        if isinstance(value, yaml.MappingNode) and value.value and not meaning:
            yield from _rows(value, f"{path}.", lines)
        else:
            yield ChartValue(path, json.dumps(yaml.SafeLoader("").construct_document(value)), meaning)


def _comment(lines: list[str], line: int) -> str:
    """The text of the `# --` comment that ends right above a line (counted from 0); empty if there is none."""
    above: list[str] = []
    while line > 0 and (text := lines[line - 1].strip()).startswith("#"):
        above.insert(0, text)
        if text.startswith(MARK):
            return " ".join([above[0].removeprefix(MARK), *(comment.lstrip("# ") for comment in above[1:])])
        line -= 1
    return ""


def render(head: str, rows: list[ChartValue]) -> str:
    """The README: `head`, then one table per top-level section."""
    sections: dict[str, list[ChartValue]] = {}
    for row in rows:
        section, dot, _ = row.path.partition(".")
        sections.setdefault(section if dot else GENERAL, []).append(row)
    parts = [head.rstrip(), "## Values"]
    for section, members in sections.items():
        table = [f"### {section}", "", "| value | default | meaning |", "|---|---|---|"]
        table += [f"| `{row.path}` | `{_cell(row.default)}` | {_cell(row.meaning)} |" for row in members]
        parts.append("\n".join(table))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write README.md; with --check only compare it, and return 1 with a line on standard error if it is stale."""
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes.chart_readme")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README.md is stale")
    parser.add_argument("--chart", type=Path, default=CHART, help="folder of the chart")
    arguments = parser.parse_args()
    chart: Path = arguments.chart
    try:
        wanted = render((chart / "README.head.md").read_text(), values((chart / "values.yaml").read_text()))
        readme = chart / "README.md"
        if not arguments.check:
            readme.write_text(wanted)
        elif not readme.is_file() or readme.read_text() != wanted:
            print(f"{readme}: stale; run `python -m deploy.kubernetes.chart_readme` to update it", file=sys.stderr)
            return 1
    except (OSError, UndocumentedError, yaml.YAMLError) as error:
        print(f"chart_readme: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
