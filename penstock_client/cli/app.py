"""Owns the application of a command line: its global options and its help.

Must not contain a command; it is given a table of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from penstock_client.cli.reporting import log_everything
from penstock_client.cli.table import CLIENT_GROUPS, CliCommand
from penstock_client.cli.terminal import print_line

DISTRIBUTIONS = ("penstock", "penstock-client")
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}

Groups = Mapping[str, tuple[typer.Typer, str]]


def build_app(commands: Iterable[CliCommand], groups: Groups | None = None) -> typer.Typer:
    """The application of these commands, and of further groups of commands with their panels, by name."""
    app = typer.Typer(
        help="Train reasoning LLMs with DAPO: rollout, verifier, sampling and learner services.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for command in commands:
        app.command(
            command.name,
            rich_help_panel=command.panel or None,
            hidden=not command.panel,
            add_help_option=not command.anything,
            context_settings=ANYTHING if command.anything else None,
        )(command.run)
    for name, (group, panel) in {**CLIENT_GROUPS, **(groups or {})}.items():
        app.add_typer(group, name=name, rich_help_panel=panel)
    return app


def _print_version(wanted: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    if not wanted:
        return
    for distribution in DISTRIBUTIONS:
        try:
            print_line(f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            continue
        raise typer.Exit
    print_line("penstock (not installed)")
    raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print tracebacks and what the client does, on standard error.")
    ] = False,
) -> None:
    if debug:
        log_everything()
