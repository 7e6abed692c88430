"""Owns the commands and their options; those with modules of their own are only registered here.

Must not import anything heavy at module level: `penstock --help` answers within a second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.commands.algorithm import app as algorithm_commands
from deploy.cli.commands.conformance import conformance
from deploy.cli.commands.dead_letters import dead
from deploy.cli.commands.evaluate import evaluate
from deploy.cli.commands.plan import plan
from deploy.cli.commands.replay import replay
from deploy.cli.commands.submit import submit
from deploy.cli.commands.waits import waits
from deploy.cli.options import (
    DEFAULT_API,
    HOST,
    PORT,
    ApiOption,
    HostOption,
    PortOption,
    RedisOption,
    RunArgument,
    RunsOption,
)
from deploy.cli.plain import plain

if TYPE_CHECKING:
    from deploy.cli.client import Api
    from deploy.local.stack import LocalStack
    from services.settings import Recipe

OBSTACLE = 2
RUN_FAILED = 1
INTERRUPTED = 130
POLL_S = 1.0
POLLS_MISSED = 30
ENDED = ("succeeded", "failed", "cancelled")

app = typer.Typer(
    help="Train reasoning LLMs with DAPO: rollout, verifier, sampling and learner services.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip

app.add_typer(algorithm_commands, name="algorithm")
app.command()(conformance)
app.command()(dead)
app.command("eval")(evaluate)
app.command()(plan)
app.command()(replay)
app.command()(submit)
app.command()(waits)


def say(text: str) -> None:
    """One line on standard output, at once."""
    print(text, flush=True)


@contextmanager
def obstacles() -> Iterator[None]:
    """Turn every known obstacle into lines on standard error and exit status 2."""
    from deploy.cli.client import ApiError
    from deploy.local.preflight import StackError
    from learner.model.source import ModelSourceError
    from services.settings import RecipeError
    from services.storage.errors import StoreError
    from services.streams.connection.client import RedisUnavailableError

    try:
        yield
    except (ApiError, ModelSourceError, StackError, RecipeError, RedisUnavailableError, StoreError) as error:
        lines = [plain(line) for line in str(error).split("\n")]
        print("penstock: " + "\n".join(lines), file=sys.stderr)
        raise typer.Exit(OBSTACLE) from None


@app.command()
def up(
    redis: RedisOption = None, host: HostOption = HOST, port: PortOption = PORT, runs: RunsOption = Path("runs"),
) -> None:  # fmt: skip
    """Run the stack in the foreground until Ctrl-C."""
    with obstacles():
        with_stack(redis, port, runs, None, lambda stack: stack.wait(), host)


@app.command()
def demo(
    redis: RedisOption = None, port: PortOption = PORT, runs: RunsOption = Path("runs"),
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Another recipe than the packaged one.")] = None,
) -> None:  # fmt: skip
    """Start the stack, train the packaged model on sums, and show how its held-out accuracy changed."""
    from services.settings import load_recipe

    with obstacles():
        loaded = load_recipe(recipe or demo_recipe())
        succeeded: list[bool] = []
        with_stack(redis, port, runs, loaded, lambda stack: succeeded.append(_demonstrate(stack, loaded)))
    raise typer.Exit(0 if succeeded == [True] else RUN_FAILED)


@app.command()
def runs(api: ApiOption = DEFAULT_API) -> None:
    """List all runs."""
    with obstacles(), open_api(api) as client:
        for one in client.runs():
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["created_at"]))
            say(plain(f"{one['id']}  {one['state']:<9}  {at}  {one['reason']}"))


@app.command()
def show(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Print all that is known of a run, as JSON."""
    with obstacles(), open_api(api) as client:
        say(json.dumps(client.show(run), indent=2))


@app.command()
def watch(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Follow a run to its end; exit status 0 only if it succeeds."""
    with obstacles(), open_api(api) as client:
        try:
            view, _ = follow(client, run)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if view["state"] == "succeeded" else RUN_FAILED)


@app.command()
def scale(
    run: RunArgument, rollout: Annotated[int, typer.Option("--rollout", min=1, help="Replicas wanted.")],
    api: ApiOption = DEFAULT_API,
) -> None:  # fmt: skip
    """Change a run's number of rollout replicas while it goes on."""
    with obstacles(), open_api(api) as client:
        say(f"{run}: {client.scale(run, rollout)['rollout_replicas']} rollout replicas wanted")


@app.command()
def cancel(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Ask for a run's end."""
    with obstacles(), open_api(api) as client:
        client.cancel(run)
        say(f"{run}: cancelling")


@app.command()
def pause(run: RunArgument, api: ApiOption = DEFAULT_API) -> None:
    """Ask a running run to pause: its processes stay, and nothing new is generated."""
    with obstacles(), open_api(api) as client:
        client.pause(run)
        say(f"{run}: pausing; `penstock resume {run}` takes it on")


@app.command()
def resume(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--from", min=0, metavar="STEP", help="Begin from this rollout step's checkpoint.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--learner-ranks", min=1, help="Another number of learner ranks.")
    ] = None,
    rollout: Annotated[int | None, typer.Option("--rollout", min=1, help="Another number of rollout replicas.")] = None,
    api: ApiOption = DEFAULT_API,
) -> None:
    """Take a paused run on, or queue one again that failed or was cancelled."""
    with obstacles(), open_api(api) as client:
        view = client.resume(run, from_step=step, learner_ranks=ranks, rollout=rollout)
        say(plain(f"{run}: {view['state']}, {view['reason']}" if view["state"] == "queued" else f"{run}: resuming"))


@app.command()
def validate(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="YAML or JSON file.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the recipe's JSON schema instead.")] = False,
) -> None:
    """Check a recipe without starting anything."""
    from services.settings import Recipe, RecipeError, load_recipe

    if schema:
        say(json.dumps(Recipe.model_json_schema(), indent=2))
        return
    with obstacles():
        if recipe is None:
            raise RecipeError("RECIPE: missing; a YAML or JSON file is accepted, or --schema")
        loaded = load_recipe(recipe)
        say(f"{recipe}: valid; run {loaded.name!r}, {loaded.limits.rollout_steps} rollout steps")


@app.command()
def doctor(port: PortOption = PORT) -> None:
    """Check what this machine has and lacks; exit status 1 if something fails."""
    from deploy.cli.commands.doctor import examine

    lines = examine(port)
    for passed, line in lines:
        say(f"{'ok  ' if passed else 'FAIL'}  {line}")
    raise typer.Exit(0 if all(passed for passed, _ in lines) else 1)


def demo_recipe() -> Path:
    """The recipe that `penstock demo` runs."""
    return Path(__file__).resolve().parents[1] / "recipes" / "smollm2-chain-sum.yaml"


def open_api(url: str) -> Api:
    """The REST API at `url`; use it as a context manager."""
    from deploy.cli.client import Api

    return Api(url)


def with_stack(
    redis: str | None, port: int, folder: Path, recipe: Recipe | None, work: Callable[[LocalStack], object],
    host: str = HOST,
) -> None:  # fmt: skip
    """Check, start the stack, work, and end it whatever happens; Ctrl-C is an ordinary end."""
    from deploy.local.preflight import is_loopback
    from deploy.local.stack import LocalStack

    stack = LocalStack(folder, host=host, port=port, redis_url=redis, report=say)
    stack.check(recipe)
    if not is_loopback(host):
        say(f"warning: the API has no authentication; whoever reaches {host}:{port} can start, change and end runs")
    try:
        with stack:
            say(f"Penstock is up after {stack.seconds['start']:.1f} s: {stack.api}")
            say(f"Redis {stack.shown_redis}, runs {stack.runs}; Ctrl-C stops")
            work(stack)
    except KeyboardInterrupt as signal:
        say(f"stopped by {signal or 'SIGINT'} in {stack.seconds['stop']:.1f} s")
        raise typer.Exit(0 if recipe is None else INTERRUPTED) from None


def _demonstrate(stack: LocalStack, recipe: Recipe) -> bool:
    """Submit the recipe, follow it, show and draw what came of it; whether it succeeded."""
    from deploy.cli.console import console
    from deploy.cli.curves import draw_curves
    from deploy.cli.progress import closing_table

    with open_api(stack.api) as client:
        cancel_earlier(client, recipe.name)
        run = str(client.submit(recipe.model_dump(mode="json"))["id"])
        say(f"run {run} submitted; `penstock watch {run} --api {stack.api}` follows it from elsewhere")
        with cancelled_on_interrupt(client, run):
            view, steps = follow(client, run, stack.check_alive)
    folder = stack.runs / run
    if steps:
        say(f"curves   {draw_curves(run, steps, view['evaluations'], folder / 'curves.png')}")
    say(f"export   {view['export_path'] or 'none'}")
    say(f"summary  {folder / 'summary.json'}")
    if view["evaluations"]:
        console().print(closing_table(view))
    return bool(view["state"] == "succeeded")


def cancel_earlier(client: Api, name: str) -> None:
    """Runs of a name that an earlier stack left unfinished (a power cut, say) would take this one's cores."""
    for one in client.runs():
        if one["id"].startswith(f"{name}-") and one["state"] not in ENDED:
            say(f"cancelling {one['id']}, which an earlier stack left unfinished")
            client.cancel(one["id"])


@contextmanager
def cancelled_on_interrupt(client: Api, run: str) -> Iterator[None]:
    """A demo that is stopped does not go on when the stack is next started."""
    try:
        yield
    except KeyboardInterrupt:
        try:
            client.cancel(run, timeout_s=2.0)
        except RuntimeError as error:
            say(f"run {run} could not be cancelled: {error}")
        raise


def follow(api: Api, run: str, check: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Print a run's progress until it has ended; its last view and all its steps. `check` is called between polls."""
    from rich.console import Console

    from deploy.cli.client import ApiUnreachableError
    from deploy.cli.progress import Follower

    follower = Follower(Console())
    silent = POLLS_MISSED  # patience begins with the first answer
    while True:
        try:
            view = api.show(run)
            follower.take(view, api.steps(run, follower.cursor))
            silent = 0
        except ApiUnreachableError as error:
            silent += 1  # a gateway that died is restarted within seconds
            if silent > POLLS_MISSED:
                raise
            say(f"no answer ({silent} of {POLLS_MISSED}): {error}")
            check()
            time.sleep(POLL_S)
            continue
        if view["state"] in ENDED:
            return view, follower.steps
        check()
        time.sleep(POLL_S)


def main() -> None:
    """The entry point of the command `penstock`."""
    app()


if __name__ == "__main__":
    main()
