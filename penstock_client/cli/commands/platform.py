"""Owns the commands about the platform: queue, whoami, projects, audit, and tokens for its access file.

Must not store a token.
"""

from __future__ import annotations

import hashlib
import secrets
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption
from penstock_client.cli.following.figures import local_time
from penstock_client.cli.terminal import plain, print_json, print_line, print_note, print_table

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import ProjectUse

MOST_SHOWN = 100


def queue(client: Client, as_json: JsonOption = False) -> None:
    """List the queued runs in the order in which they will be placed, and what each waits for."""
    from penstock_client.answers import as_json as document

    found = client.queue()
    if as_json:
        print_json(document(found))
        return
    rows = [
        [str(run.position), run.id, run.project, str(run.priority), local_time(run.since), run.waits_for]
        for run in found.runs
    ]
    print_table(["place", "run", "project", "priority", "since", "waits for"], rows, right=["place", "priority"])
    if not rows:
        print_note(f"{found.length} runs are queued, none of which you can see" if found.length else "no queued runs")


def whoami(client: Client, as_json: JsonOption = False) -> None:
    """Show who you are for the API, and your role in each project."""
    from penstock_client.answers import as_json as document

    found = client.whoami()
    if as_json:
        print_json(document(found))
        return
    until = "" if found.expires_at is None else f", until {local_time(found.expires_at)}"
    print_line(plain(f"{found.name}{until}"))
    print_table(["project", "role"], [[name, role] for name, role in found.roles.items()])


def projects(client: Client, as_json: JsonOption = False) -> None:
    """List the projects that you can see: your role, and what active runs use of each quota."""
    from penstock_client.answers import as_json as document

    found = client.projects()
    if as_json:
        print_json([document(project) for project in found])
        return
    rows = [[project.name, project.role, *_uses(project.use, project.quota)] for project in found]
    print_table(["project", "role", "gpus", "runs", "redis memory"], rows, right=["gpus", "runs", "redis memory"])
    if not rows:
        print_note("no projects")


def _uses(use: ProjectUse, quota: ProjectUse) -> list[str]:
    return [
        _share(use.gpus, quota.gpus, "{:g}"),
        _share(use.runs, quota.runs, "{:d}"),
        _share(_mebibytes(use.redis_memory), _mebibytes(quota.redis_memory), "{:,.0f} MiB"),
    ]


def _share(used: float | None, most: float | None, form: str) -> str:
    return form.format(used or 0) + ("" if most is None else f" of {form.format(most)}")


def _mebibytes(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def audit(
    client: Client,
    run: Annotated[str | None, typer.Option("--run", help="Only changes of this run.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="Only changes by this principal.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only changes in this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = MOST_SHOWN,
    as_json: JsonOption = False,
) -> None:
    """List changes and denied requests, the newest first: who, what, from where, with which outcome."""
    from penstock_client.answers import as_json as document

    found = list(islice(client.audit(run=run, by=by, project=project), limit))
    if as_json:
        print_json([document(entry) for entry in found])
        return
    rows = [
        [
            local_time(entry.at),
            entry.principal or "-",
            entry.address,
            f"{entry.outcome} {entry.status or ''}".strip(),
            f"{entry.method} {entry.path}",
        ]
        for entry in found
    ]
    print_table(["when", "who", "from", "outcome", "what"], rows)
    if not rows:
        print_note("no entries")


token_app = typer.Typer(help="Make tokens.", no_args_is_help=True)


@token_app.callback()
def token() -> None:
    """Make tokens for a platform's access file."""


@token_app.command("new")
def new_token() -> None:
    """Print a new token, and the digest by which the platform's access file knows it."""
    token = secrets.token_urlsafe(32)
    print_line(f"token   {token}")
    print_line(f"sha256  {hashlib.sha256(token.encode()).hexdigest()}")
    print_note("give the token to its user alone, and the digest to the access file; nothing has stored either of them")
