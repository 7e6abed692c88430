"""Owns `penstock compare`: runs beside each other.

Must not judge which run is better.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption, checked_run
from penstock_client.cli.following.figures import number
from penstock_client.cli.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client

METRICS = ("accuracy", "reward", "entropy", "response_length")
ABSENT = "-"


def compare(
    client: Client,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of two to eight runs.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Show this metric; may be repeated. Default: four of them.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: the settings that differ, and each metric's curve with its last value."""
    from penstock_client.answers import as_json as document
    from penstock_client.cli.following.live import sparkline

    found = client.compare([checked_run(run) for run in runs], None if as_json and not metric else metric or METRICS)
    if as_json:
        print_json(document(found))
        return
    settings = [[change.path, *(_shown(change.values, run) for run in found.runs)] for change in found.settings]
    print_table(["setting", *found.runs], settings)
    if settings:
        print_line("")
    rows = []
    for name, curves in found.curves.items():
        for run in found.runs:
            values = [value for value in curves.get(run, ()) if value is not None]
            rows.append([name, run, number(values[-1] if values else None, "{:.4g}"), sparkline(values) or ABSENT])
    print_table(["metric", "run", "last", "curve"], rows, right=["last"])


def _shown(values: dict[str, object], run: str) -> str:
    return json.dumps(values[run], ensure_ascii=False) if run in values else ABSENT
