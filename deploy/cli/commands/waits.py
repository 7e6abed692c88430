"""Owns `penstock waits`: what a run's processes wait for, as a table.

Must not judge a wait; the API says which are stalled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.cli.options import DEFAULT_API, ApiOption, RunArgument
from deploy.cli.plain import cell

if TYPE_CHECKING:
    from rich.table import Table


def waits(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Print what a run's processes wait for, and since when, longest first."""
    from deploy.cli.console import console
    from deploy.cli.main import obstacles, open_api

    with obstacles(), open_api(api) as client:
        found = client.waits(run)
        console().print(waits_table(run, found) if found else cell(f"{run}: nothing waits"))


def waits_table(run: str, waits: list[dict[str, Any]]) -> Table:
    """A row a wait; `waits` as the API gives them."""
    from rich.table import Table

    from deploy.cli.progress import duration

    table = Table(title=cell(f"{run}: waits"))
    for title in ("for", "at most"):
        table.add_column(title, justify="right")
    for title in ("", "process", "wait", "for what"):
        table.add_column(title, overflow="fold")
    for one in waits:
        mark = "stalled" if one["stalled"] else "idle" if one["idle"] else ""
        told = (duration(one["seconds"]), duration(one["deadline_s"]), mark, one["process"], one["name"])
        table.add_row(*map(cell, (*told, one["waits_for"])))
    return table
