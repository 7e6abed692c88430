"""Owns the command `penstock`: the table of its commands.

Must not contain a command, nor import anything heavy: `penstock --help` answers within a second.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from deploy.cli.commands import algorithm, runs, stack
from deploy.cli.commands.conformance import conformance
from deploy.cli.commands.dead_letters import dead
from deploy.cli.commands.doctor import doctor
from deploy.cli.commands.evaluate import evaluate
from deploy.cli.commands.plan import plan
from deploy.cli.commands.replay import replay
from deploy.cli.commands.submit import submit
from deploy.cli.commands.validate import validate
from deploy.cli.commands.waits import waits
from deploy.cli.data import to_integer
from deploy.cli.judging import reward
from deploy.cli.judging.rescore.command import rescore
from deploy.cli.judging.verify import verify

COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("up", stack.up),
    ("demo", stack.demo),
    ("submit", submit),
    ("runs", runs.runs),
    ("show", runs.show),
    ("watch", runs.watch),
    ("scale", runs.scale),
    ("cancel", runs.cancel),
    ("pause", runs.pause),
    ("resume", runs.resume),
    ("delete", runs.delete),
    ("waits", waits),
    ("dead", dead),
    ("validate", validate),
    ("plan", plan),
    ("eval", evaluate),
    ("replay", replay),
    ("verify", verify),
    ("rescore", rescore),
    ("conformance", conformance),
    ("doctor", doctor),
)

app = typer.Typer(
    help="Train reasoning LLMs with DAPO: rollout, verifier, sampling and learner services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command in COMMANDS:
    app.command(name)(command)
app.add_typer(algorithm.app, name="algorithm")
app.add_typer(reward.app, name="reward")
app.add_typer(to_integer.app, name="data")


def main() -> None:
    """The entry point of the command `penstock`."""
    app()


if __name__ == "__main__":
    main()
