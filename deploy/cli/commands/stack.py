"""Owns the commands that run a stack on this machine: up and demo.

Must not supervise; deploy.local.stack does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.common import (
    DEFAULT_RUNS,
    HostOption,
    PortOption,
    RedisOption,
    RunsOption,
    open_api,
    reported_errors,
    with_stack,
)
from penstock_client.cli.connection import HOST, PORT
from penstock_client.cli.following.follow import cancel_unfinished, cancelled_on_interrupt, follow
from penstock_client.cli.reporting import EXIT_FAILED, warn
from penstock_client.cli.terminal import console, print_line

if TYPE_CHECKING:
    from deploy.local.stack import LocalStack
    from services.settings import Recipe

DemoRecipeOption = Annotated[Path | None, typer.Option("--recipe", help="Run this recipe instead of the packaged one.")]


def up(
    redis: RedisOption = None, host: HostOption = HOST, port: PortOption = PORT, runs: RunsOption = DEFAULT_RUNS
) -> None:
    """Run the stack in the foreground until Ctrl-C."""
    with reported_errors():
        with_stack(lambda stack: stack.wait(), redis=redis, port=port, runs=runs, host=host)


def demo(
    redis: RedisOption = None,
    port: PortOption = PORT,
    runs: RunsOption = DEFAULT_RUNS,
    recipe: DemoRecipeOption = None,
) -> None:
    """Start the stack, train the packaged model on sums, and show how its held-out accuracy changed."""
    from deploy.cli.recipe_files import load_with_files

    with reported_errors():
        loaded, files = load_with_files(recipe or demo_recipe())
        succeeded: list[bool] = []
        with_stack(
            lambda stack: succeeded.append(_demonstrate(stack, loaded, files)),
            redis=redis,
            port=port,
            runs=runs,
            recipe=loaded,
        )
    raise typer.Exit(0 if succeeded == [True] else EXIT_FAILED)


def demo_recipe() -> Path:
    """The recipe that `penstock demo` runs."""
    return Path(__file__).resolve().parents[2] / "recipes" / "smollm2-chain-sum.yaml"


def _demonstrate(stack: LocalStack, recipe: Recipe, files: dict[str, str]) -> bool:
    """Submit the recipe, follow the run, print and draw its results. Returns whether the run succeeded."""
    from deploy.cli.curves import draw_curves
    from penstock_client.cli.following.tables import closing_table

    with open_api(stack.api) as client:
        cancel_unfinished(client, recipe.name)
        submitted = client.submit(recipe.model_dump(mode="json"), files=files)
        for text in submitted.warnings:
            warn(text)
        run = submitted.id
        print_line(f"run {run} submitted; `penstock watch {run} --api {stack.api}` follows it from another terminal")
        with cancelled_on_interrupt(client, run):
            view, steps = follow(client, run, stack.check_alive)
    folder = stack.runs / run
    if steps:
        print_line(f"curves   {draw_curves(run, steps, view.evaluations, folder / 'curves.png')}")
    print_line(f"export   {view.export_path or 'none'}")
    print_line(f"summary  {folder / 'summary.json'}")
    if view.evaluations:
        console().print(closing_table(view))
    return view.state == "succeeded"
