"""Owns `penstock dead`: a run's dead letters as a table.

Must not trust the content of a message: all of it is printed as plain text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from deploy.cli.common import DEFAULT_API, ApiOption, RunArgument, open_api, reported_errors
from deploy.cli.terminal import cell, console

if TYPE_CHECKING:
    from rich.table import Table

REASON_SHOWN = 300


def dead(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """List dead letters and their reasons."""
    with reported_errors(), open_api(api) as client:
        letters = client.dead(run)
        console().print(dead_table(run, letters) if letters else cell(f"{run}: no dead letters"))


def dead_table(run: str, letters: list[dict[str, Any]]) -> Table:
    """One row per dead letter; `letters` as the API returns them."""
    from rich.table import Table

    table = Table(title=cell(f"{run}: dead letters"))
    for title in ("entry", "when", "stream", "cause", "reason", "group"):
        table.add_column(title, overflow="fold")
    for letter in letters:
        values = (
            letter["entry"],
            _local_time(letter["at"]),
            letter["stream"].removeprefix(f"penstock:{{{run}}}:"),
            letter["cause"],
            letter["reason"][:REASON_SHOWN],
            letter["group"] or "-",
        )
        table.add_row(*map(cell, values))
    return table


def _local_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # the message may hold any number
        return "-"
