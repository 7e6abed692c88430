"""Owns the commands that only call the API, and the names of those that need the platform.

Must not contain a command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from penstock_client.cli.commands import changes, endings, files, looking, platform, runs, samples
from penstock_client.cli.commands.compare import compare
from penstock_client.cli.commands.ledger import ledger
from penstock_client.cli.commands.logs import events, logs
from penstock_client.cli.commands.submit import check_with, clone, submit_with
from penstock_client.cli.connection import connected
from penstock_client.cli.recipe import RecipeReader
from penstock_client.cli.reporting import fail

RUNS, LOOK, CHANGE, ACCESS = "Runs", "Look into a run", "Change a run", "Access"
PLATFORM, RECIPES, JUDGE = "This machine", "Recipes and algorithm", "Rewards and data"
PLATFORM_COMMANDS = (
    "up",
    "demo",
    "doctor",
    "eval",
    "validate",
    "plan",
    "algorithm",
    "conformance",
    "replay",
    "recover",
    "places",
    "bench",
    "verify",
    "reward",
    "rescore",
    "data",
)
"""Commands of the full installation (deploy.cli)."""


@dataclass(frozen=True)
class CliCommand:
    """A command: its name, the function that Typer calls, and the panel of `--help` that lists it.

    `anything`: it takes whatever arguments are given, also `--help`. Without a panel it is hidden.
    """

    name: str
    run: Callable[..., None]
    panel: str = ""
    anything: bool = False


def client_commands(read: RecipeReader) -> tuple[CliCommand, ...]:
    """The commands that only call the API; `read` reads recipes."""
    found: tuple[tuple[str, Callable[..., None], str], ...] = (
        ("submit", submit_with(read), RUNS),
        ("clone", clone, RUNS),
        ("check", check_with(read), RUNS),
        ("runs", runs.runs, RUNS),
        ("queue", platform.queue, RUNS),
        ("show", runs.show, RUNS),
        ("watch", runs.watch, RUNS),
        ("events", events, LOOK),
        ("logs", logs, LOOK),
        ("samples", samples.samples, LOOK),
        ("lineage", samples.lineage, LOOK),
        ("ledger", ledger, LOOK),
        ("compare", compare, LOOK),
        ("checkpoints", files.checkpoints, LOOK),
        ("export", files.export, LOOK),
        ("waits", looking.waits, LOOK),
        ("dead", looking.dead, LOOK),
        ("unknown", looking.unknown, LOOK),
        ("scale", changes.scale, CHANGE),
        ("edit", changes.edit, CHANGE),
        ("pause", changes.pause, CHANGE),
        ("resume", changes.resume, CHANGE),
        ("cancel", changes.cancel, CHANGE),
        ("archive", endings.archive, CHANGE),
        ("adopt", endings.adopt, CHANGE),
        ("delete", endings.delete, CHANGE),
        ("whoami", platform.whoami, ACCESS),
        ("projects", platform.projects, ACCESS),
        ("audit", platform.audit, ACCESS),
    )
    return tuple(CliCommand(name, connected(command), panel) for name, command, panel in found)


CLIENT_GROUPS = {"token": (platform.token_app, ACCESS)}
"""Groups of commands that need nothing, with their panels."""


def absent_commands() -> tuple[CliCommand, ...]:
    """What the names of the platform's commands answer where only the client is installed."""
    return tuple(CliCommand(name, _absent(name), anything=True) for name in PLATFORM_COMMANDS)


def _absent(name: str) -> Callable[[], None]:
    def needs_more() -> NoReturn:
        fail(f"{name}: needs the full installation of Penstock; this one has only the client of its API")

    return needs_more
