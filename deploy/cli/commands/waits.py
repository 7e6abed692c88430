"""Owns `penstock waits`: what a run's processes wait for, as a table.

Must not judge a wait; the API marks the stalled ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.cli.common import DEFAULT_API, ApiOption, RunArgument, open_api, reported_errors
from deploy.cli.terminal import cell, console

if TYPE_CHECKING:
    from rich.table import Table


def waits(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Print what a run's processes wait for and for how long, longest wait first."""
    with reported_errors(), open_api(api) as client:
        found = client.waits(run)
        console().print(waits_table(run, found) if found else cell(f"{run}: nothing waits"))


def waits_table(run: str, waits: list[dict[str, Any]]) -> Table:
    """One row per wait; `waits` as the API returns them."""
    from rich.table import Table

    from deploy.cli.progress import duration

    table = Table(title=cell(f"{run}: waits"))
    for title in ("duration", "deadline"):
        table.add_column(title, justify="right")
    for title in ("", "process", "wait", "waits for"):
        table.add_column(title, overflow="fold")
    for wait in waits:
        mark = "stalled" if wait["stalled"] else "idle" if wait["idle"] else ""
        values = (duration(wait["seconds"]), duration(wait["deadline_s"]), mark, wait["process"], wait["name"])
        table.add_row(*map(cell, (*values, wait["waits_for"])))
    return table
