"""Owns the following of a run until it has ended, and its cancellation when the user stops.

Must not lay anything out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock_client.cli.following.notices import POLL_S, RunNotices
from penstock_client.cli.terminal import plain, print_line

if TYPE_CHECKING:
    from penstock_client.cli.following.live import LiveView
    from penstock_client.cli.following.progress import Follower
    from penstock_client.client import Client
    from penstock_client.models import RolloutStep, Run

MISSED_POLLS = 30
"""How many looks in a row may fail before `follow` fails."""
UNKNOWN, UNREADABLE = 404, 409
"""The API's answers for a run that does not exist, and for one whose recipe its release cannot read."""


def follow(
    client: Client, run: str, check: Callable[[], None] = lambda: None, live: bool = False
) -> tuple[Run, list[RolloutStep]]:
    """Print a run's progress until the run has ended; returns its last view and all its steps.

    The run is looked at when its stream of events says so. `live`: as a drawing, if standard output is a terminal.
    `check` is called about every second and may raise. Raises ApiError; ApiUnreachableError only after MISSED_POLLS
    looks in a row without an answer.
    """
    from penstock_client.errors import ApiError
    from penstock_client.transport import is_passing

    printer, notices = _printer(live), RunNotices(client, run)
    missed = MISSED_POLLS  # no look may be missed before the first answer

    def tick() -> None:
        check()
        printer.refresh()

    try:
        while True:
            try:
                view = client.show(run)
                printer.take(view, client.steps(run, printer.steps[-1].id if printer.steps else "0-0"))
                missed = 0
            except ApiError as error:
                missed += 1  # a gateway that died is restarted within seconds
                if missed > MISSED_POLLS or not is_passing(error):
                    raise
                print_line(plain(f"no answer ({missed} of {MISSED_POLLS}): {error}"))
                check()
                time.sleep(POLL_S)
                continue
            if view.ended:
                return view, printer.steps
            notices.open()
            notices.wait(tick)
    finally:
        notices.close()
        printer.close()


def exists(client: Client, run: str) -> bool:
    """Whether the API knows a run. Raises ApiError."""
    from penstock_client.errors import ApiError

    try:
        client.show(run)
    except ApiError as error:
        if error.status == UNREADABLE:
            return True
        if error.status == UNKNOWN:
            return False
        raise
    return True


def _printer(live: bool) -> Follower | LiveView:
    from rich.console import Console

    if live and sys.stdout.isatty():
        from penstock_client.cli.following.live import LiveView

        return LiveView(Console())
    from penstock_client.cli.following.progress import Follower

    return Follower(Console())


@contextmanager
def cancelled_on_interrupt(client: Client, run: str) -> Iterator[None]:
    """Cancel the run on Ctrl-C, so that it does not continue when the stack is started the next time."""
    try:
        yield
    except KeyboardInterrupt:
        try:
            client.cancel(run, timeout_s=2.0)
        except RuntimeError as error:
            print_line(plain(f"run {run} could not be cancelled: {error}"))
        raise


def cancel_unfinished(client: Client, name: str) -> None:
    """Cancel the runs of this name that a previous stack left unfinished, as they would use the new run's cores."""
    for entry in client.runs():
        if entry.id.startswith(f"{name}-") and not entry.ended:
            print_line(plain(f"cancelling {entry.id}, which a previous stack left unfinished"))
            client.cancel(entry.id)
