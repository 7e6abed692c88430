"""Owns the commands that change the course of a run: scale, edit, pause, resume and cancel.

Must not decide whether a run allows a change; the API does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.commands.arguments import JsonOption, RunArgument, read_settings
from penstock_client.cli.following.figures import hint
from penstock_client.cli.reporting import fail, warn
from penstock_client.cli.terminal import plain, print_json, print_line

if TYPE_CHECKING:
    from penstock_client.client import Client
    from penstock_client.models import ApiModel


def scale(
    client: Client,
    run: RunArgument,
    rollout: Annotated[int | None, typer.Option("--rollout", min=1, help="Desired number of rollout replicas.")] = None,
    verifiers: Annotated[int | None, typer.Option("--verifiers", min=1, help="Desired number of verifiers.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Change a run's number of rollout replicas, of verifiers, or of both; the run continues."""
    if rollout is None and verifiers is None:
        fail("--rollout, --verifiers: give at least one of them")
    view = client.scale(run, rollout, verifiers)
    if _printed(view, as_json):
        return
    told = [] if rollout is None else [f"{view.rollout_replicas} rollout replicas"]
    told += [] if verifiers is None else [f"{verifiers} verifiers"]
    print_line(f"{run}: {' and '.join(told)} desired")


def _printed(answer: ApiModel, as_json: bool) -> bool:
    """Whether the answer is wanted as JSON, which is printed then."""
    from penstock_client.answers import as_json as document

    if as_json:
        print_json(document(answer))
    return as_json


def cancel(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """Cancel a run."""
    if not _printed(client.cancel(run), as_json):
        print_line(f"{run}: cancelling")


def pause(client: Client, run: RunArgument, as_json: JsonOption = False) -> None:
    """Pause a run: its processes keep running, and nothing new is generated."""
    if not _printed(client.pause(run), as_json):
        print_line(f"{run}: pausing; {hint('resume', run)} resumes it")


def resume(
    client: Client,
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--from", min=0, metavar="STEP", help="Resume from this rollout step's checkpoint.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--learner-ranks", min=1, help="Resume with this number of learner ranks.")
    ] = None,
    rollout: Annotated[
        int | None, typer.Option("--rollout", min=1, help="Resume with this number of rollout replicas.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a run: continue a paused one, or queue a failed or cancelled one again."""
    view = client.resume(run, from_step=step, learner_ranks=ranks, rollout=rollout)
    for text in view.warnings:
        warn(text)
    if _printed(view, as_json):
        return
    queued = view.state == "queued"
    print_line(plain(f"{run}: {view.state}, {view.reason}" if queued else f"{run}: resuming"))


def edit(
    client: Client,
    run: RunArgument,
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Settings by their names, and `priority`.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Change settings of a run while it continues, such as learner.learning_rate=1e-6 or priority=10."""
    view = client.edit(run, read_settings(settings, "NAME=VALUE"))
    for text in view.warnings:
        warn(text)
    if _printed(view, as_json):
        return
    changes = view.edits[-1].changes if view.edits else {}
    told = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items())
    print_line(plain(f"{run}: {told or 'nothing changes'}"))
