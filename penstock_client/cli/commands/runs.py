"""Owns the commands that show runs: runs, show and watch.

Must not change a run.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock_client.cli.commands.arguments import JsonOption, RunArgument
from penstock_client.cli.following.follow import follow
from penstock_client.cli.reporting import EXIT_FAILED
from penstock_client.cli.terminal import console, print_json, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client

MOST_SHOWN = 100
MINUTES = "%Y-%m-%d %H:%M"
SHOWN_DIGEST = 12
"""Characters of a file's digest."""


def runs(
    client: Client,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only runs in this state; may be repeated.")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only runs of this project.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only runs whose id has this part.")] = None,
    archived: Annotated[
        bool | None,
        typer.Option("--archived/--no-archived", help="Only runs that are archived, or only others; default: both."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = MOST_SHOWN,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest first."""
    from penstock_client.answers import as_json as document
    from penstock_client.cli.following.figures import local_time

    matching = client.runs(state=state, project=project, name=name, archived=archived)
    found = list(islice(matching, limit))
    if as_json:
        print_json([document(entry) for entry in found])
        return
    projects = {entry.project for entry in found if entry.project}
    rows = [
        [
            entry.id,
            *([entry.project or "-"] if len(projects) > 1 else []),
            entry.state,
            local_time(entry.created_at, MINUTES),
            f"{entry.reason} ({entry.closing})" if entry.closing else entry.reason,
        ]
        for entry in found
    ]
    print_table(["run", *(["project"] if len(projects) > 1 else []), "state", "created", "reason"], rows)
    if not rows:
        print_note("no runs")
    elif next(matching, None) is not None:
        print_note(f"and more: --limit {10 * limit}")


def show(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """Show a run's state, settings and results: in short on a terminal, else all of it as JSON."""
    from penstock_client.answers import as_json as document
    from penstock_client.cli.following.tables import closing_table, service_table, summary_rows

    view = client.show(run)
    if as_json or not sys.stdout.isatty():
        files = {name: digest[:SHOWN_DIGEST] for name, digest in view.files.items()}
        print_json(document(view) | {"files": files})
        return
    import time

    out = console()
    _print_pairs(out, summary_rows(view))
    if view.processes:
        out.print()
        out.print(service_table(view, time.time()))
    if view.evaluations:
        out.print()
        out.print(closing_table(view))


def _print_pairs(out: Any, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table

    from penstock_client.cli.terminal import cell

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, cell(text))
    out.print(table)


def watch(
    client: Client,
    run: RunArgument,
    lines: Annotated[bool, typer.Option("--lines", help="Print lines on a terminal too.")] = False,
) -> None:
    """Watch a run until it ends: a live view on a terminal, else lines. Exit status 0 if it succeeds, else 1."""
    view, _ = follow(client, run, live=not lines)
    raise typer.Exit(0 if view.state == "succeeded" else EXIT_FAILED)
