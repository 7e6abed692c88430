"""Owns what several commands share: options, exit statuses, error reporting, the local stack, following a run.

Must not import a command, nor anything heavy at module level: `penstock --help` answers within a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from deploy.cli.terminal import plain, print_line

if TYPE_CHECKING:
    from deploy.cli.client import Api
    from deploy.local.stack import LocalStack
    from services.settings import Recipe

EXIT_FAILED = 1
"""The run, or a check, did not succeed."""
EXIT_ERROR = 2
"""The command could not do its work."""
EXIT_INTERRUPTED = 130

POLL_S = 1.0
MISSED_POLLS = 30
"""How many polls in a row may fail before `follow` fails."""
FINAL_STATES = ("succeeded", "failed", "cancelled")

HOST = "127.0.0.1"
PORT = 8470
DEFAULT_API = f"http://{HOST}:{PORT}"
DEFAULT_RUNS = Path("runs")

ApiOption = Annotated[str, typer.Option("--api", envvar="PENSTOCK_API", help="Address of the REST API.")]


def fail(message: str) -> NoReturn:
    """Print `penstock: MESSAGE` on standard error, control characters escaped, and exit with status 2."""
    lines = [plain(line) for line in message.split("\n")]
    print("penstock: " + "\n".join(lines), file=sys.stderr)
    raise typer.Exit(EXIT_ERROR) from None


def _run_id(run: str) -> str:
    """The id of a run; `fail` for anything else, which could name another route or folder."""
    from services.streams.keys import RunKeys

    try:
        return RunKeys(run).run
    except ValueError as error:
        fail(str(error))


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", callback=_run_id)]
RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file, YAML or JSON.")]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="PENSTOCK_REDIS",
        metavar="URL",
        help="Redis to use: redis://host:port/db or a form from docs/operations/redis.md; default: an embedded server.",
    ),
]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the REST API.")]
RunsOption = Annotated[Path, typer.Option("--runs", envvar="PENSTOCK_RUNS", help="Folder for runs, models and data.")]
HostOption = Annotated[str, typer.Option("--host", help="IPv4 address on which the REST API listens.")]


@contextmanager
def reported_errors() -> Iterator[None]:
    """Report every expected error with `fail`; all others are raised."""
    from deploy.cli.client import ApiError
    from deploy.local.preflight import StackError
    from learner.model.source import ModelSourceError
    from services.settings import RecipeError
    from services.storage.errors import StoreError
    from services.streams.connection.client import RedisUnavailableError

    try:
        yield
    except (ApiError, ModelSourceError, StackError, RecipeError, RedisUnavailableError, StoreError) as error:
        fail(str(error))


def print_warnings(view: dict[str, Any]) -> None:
    """Print the warnings of a run that was submitted or resumed, on standard error."""
    for text in view["warnings"]:
        print(f"penstock: warning: {plain(text)}", file=sys.stderr)


def open_api(url: str) -> Api:
    """A client for the REST API at `url`; use it as a context manager."""
    from deploy.cli.client import Api

    return Api(url)


def with_stack(
    work: Callable[[LocalStack], object],
    *,
    redis: str | None,
    port: int,
    runs: Path,
    recipe: Recipe | None = None,
    host: str = HOST,
) -> None:
    """Run the preflight checks, start the stack, call `work`, and stop the stack in every case.

    Ctrl-C stops it as well: exit status 0 without a recipe, 130 with one. Raises StackError, RedisUnavailableError.
    """
    from deploy.local.preflight import is_loopback
    from deploy.local.stack import LocalStack

    stack = LocalStack(runs, host=host, port=port, redis_url=redis, report=print_line)
    stack.check(recipe)
    if not is_loopback(host):
        print_line(
            f"warning: the API has no authentication; every client that reaches {host}:{port} can start, change and "
            "cancel runs"
        )
    try:
        with stack:
            print_line(f"Penstock is up after {stack.seconds['start']:.1f} s: {stack.api}")
            print_line(f"Redis {stack.shown_redis}, runs {stack.runs}; press Ctrl-C to stop")
            work(stack)
    except KeyboardInterrupt as signal:
        print_line(f"stopped by {signal or 'SIGINT'} in {stack.seconds['stop']:.1f} s")
        raise typer.Exit(0 if recipe is None else EXIT_INTERRUPTED) from None


def follow(api: Api, run: str, check: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Print a run's progress until the run has ended; returns its last view and all its steps.

    `check` is called between polls and may raise. Raises ApiUnreachableError after MISSED_POLLS polls in a row.
    """
    from rich.console import Console

    from deploy.cli.client import ApiUnreachableError
    from deploy.cli.progress import Follower

    follower = Follower(Console())
    missed = MISSED_POLLS  # no poll may be missed before the first answer
    while True:
        try:
            view = api.show(run)
            follower.take(view, api.steps(run, follower.cursor))
            missed = 0
        except ApiUnreachableError as error:
            missed += 1  # a gateway that died is restarted within seconds
            if missed > MISSED_POLLS:
                raise
            print_line(f"no answer ({missed} of {MISSED_POLLS}): {error}")
            check()
            time.sleep(POLL_S)
            continue
        if view["state"] in FINAL_STATES:
            return view, follower.steps
        check()
        time.sleep(POLL_S)


def cancel_unfinished(client: Api, name: str) -> None:
    """Cancel the runs of this name that a previous stack left unfinished, as they would use the new run's cores."""
    for view in client.runs():
        if view["id"].startswith(f"{name}-") and view["state"] not in FINAL_STATES:
            print_line(f"cancelling {view['id']}, which a previous stack left unfinished")
            client.cancel(view["id"])


@contextmanager
def cancelled_on_interrupt(client: Api, run: str) -> Iterator[None]:
    """Cancel the run on Ctrl-C, so that it does not continue when the stack is started the next time."""
    try:
        yield
    except KeyboardInterrupt:
        try:
            client.cancel(run, timeout_s=2.0)
        except RuntimeError as error:
            print_line(f"run {run} could not be cancelled: {error}")
        raise
