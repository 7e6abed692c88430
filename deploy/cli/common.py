"""Owns what the platform's commands share: options, error reporting, the local stack.

Must not import a command, nor anything heavy at module level: `penstock --help` answers within a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock_client.cli.connection import HOST, ApiConnection
from penstock_client.cli.reporting import EXIT_INTERRUPTED, fail
from penstock_client.cli.terminal import print_line

if TYPE_CHECKING:
    from deploy.local.stack import LocalStack
    from penstock_client.cli.recipe import ReadRecipe
    from penstock_client.client import Client
    from services.settings import Recipe

DEFAULT_RUNS = Path("runs")

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
    from deploy.local.preflight import StackError
    from learner.model.source import ModelSourceError
    from penstock_client.errors import ApiError
    from services.settings import RecipeError
    from services.storage.errors import StoreError
    from services.streams.connection.client import RedisUnavailableError

    try:
        yield
    except (ApiError, ModelSourceError, StackError, RecipeError, RedisUnavailableError, StoreError) as error:
        fail(str(error))


def read_for_submission(path: Path, api: str) -> ReadRecipe:
    """A valid recipe for the API at an address, with its files, as it is submitted. Raises RecipeFileError."""
    from deploy.cli.recipe_files import load_with_files
    from penstock_client.cli.recipe import ReadRecipe, RecipeFileError
    from services.settings import RecipeError

    try:
        recipe, files = load_with_files(path, api)
    except RecipeError as error:
        raise RecipeFileError(str(error)) from None
    return ReadRecipe(recipe.model_dump(mode="json"), files)


def open_api(url: str) -> Client:
    """A client for the REST API of a stack on this machine, with its token; use it as a context manager."""
    from penstock_client.access import stack_token

    # Not the token of the environment, which may be that of another platform.
    return ApiConnection(url, stack_token(url)).open()


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
            f"warning: the API listens on {host}:{port} without TLS; the token can be read on the way to it, and "
            "its holder may do everything"
        )
    try:
        with stack:
            print_line(f"Penstock is up after {stack.seconds['start']:.1f} s: {stack.api}")
            print_line(f"Redis {stack.shown_redis}, runs {stack.runs}; press Ctrl-C to stop")
            if sys.stdout.isatty():  # a log must not hold the token
                print_line(f"Sign in: {stack.sign_in_link}")
            work(stack)
    except KeyboardInterrupt as signal:
        print_line(f"stopped by {signal or 'SIGINT'} in {stack.seconds['stop']:.1f} s")
        raise typer.Exit(0 if recipe is None else EXIT_INTERRUPTED) from None
