"""Owns the commands for runs that exist: runs, show, watch, scale, cancel, pause, resume and delete.

Must not decide whether a run allows a change; the API does.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from deploy.cli.common import (
    DEFAULT_API,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    POLL_S,
    ApiOption,
    RunArgument,
    fail,
    follow,
    open_api,
    print_warnings,
    reported_errors,
)
from deploy.cli.terminal import plain, print_line

DELETION_S = 600.0
"""How long `delete` waits for the controller."""
SHOWN_DIGEST = 12
"""Characters of a file's digest."""


def runs(api: ApiOption = DEFAULT_API) -> None:
    """List all runs."""
    with reported_errors(), open_api(api) as client:
        for view in client.runs():
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view["created_at"]))
            closing = f" ({view['closing']})" if view.get("closing") else ""
            print_line(plain(f"{view['id']}  {view['state']:<9}  {at}  {view['reason']}{closing}"))


def show(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Print a run's state, settings and results as JSON."""
    with reported_errors(), open_api(api) as client:
        view = client.show(run)
        files = {name: digest[:SHOWN_DIGEST] for name, digest in view.get("files", {}).items()}
        print_line(json.dumps(view | {"files": files}, indent=2))


def watch(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Print a run's progress until the run ends; exit status 0 if it succeeds, else 1."""
    with reported_errors(), open_api(api) as client:
        try:
            view, _ = follow(client, run)
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(0 if view["state"] == "succeeded" else EXIT_FAILED)


def scale(
    run: RunArgument,
    rollout: Annotated[int, typer.Option("--rollout", min=1, help="Desired number of rollout replicas.")],
    api: ApiOption = DEFAULT_API,
) -> None:
    """Change a run's number of rollout replicas; the run continues."""
    with reported_errors(), open_api(api) as client:
        print_line(f"{run}: {client.scale(run, rollout)['rollout_replicas']} rollout replicas desired")


def cancel(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Cancel a run."""
    with reported_errors(), open_api(api) as client:
        client.cancel(run)
        print_line(f"{run}: cancelling")


def pause(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Pause a run: its processes keep running, and nothing new is generated."""
    with reported_errors(), open_api(api) as client:
        client.pause(run)
        print_line(f"{run}: pausing; `penstock resume {run}` resumes it")


def resume(
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
    api: ApiOption = DEFAULT_API,
) -> None:
    """Resume a run: continue a paused one, or queue a failed or cancelled one again."""
    with reported_errors(), open_api(api) as client:
        view = client.resume(run, from_step=step, learner_ranks=ranks, rollout=rollout)
        print_warnings(view)
        queued = view["state"] == "queued"
        print_line(plain(f"{run}: {view['state']}, {view['reason']}" if queued else f"{run}: resuming"))


def delete(
    run: RunArgument,
    files: Annotated[bool, typer.Option("--files", help="Also delete its folder, and what the store has.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    api: ApiOption = DEFAULT_API,
) -> None:
    """Delete a run that has ended: all that Redis holds of it, and with --files its files."""
    with reported_errors(), open_api(api) as client:
        what = " and all of its files" if files else "; its files stay"
        if not yes and not typer.confirm(f"Delete run {run} from Redis{what}?"):
            raise typer.Exit(EXIT_FAILED)
        deleted = client.delete(run, files)["id"]
        ends = time.monotonic() + DELETION_S
        while any(view["id"] == deleted for view in client.runs()):
            if time.monotonic() > ends:
                fail(f"{run}: not deleted within {DELETION_S:g} s; the controller continues, see `penstock show {run}`")
            time.sleep(POLL_S)
        print_line(f"{deleted}: deleted")
