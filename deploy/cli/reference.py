"""Owns docs/reference/cli.md: every command of `penstock`, from the code (`python -m deploy.cli.reference [--check]`).

Must not describe a command itself; its function does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from penstock_client.cli.connection import OPTIONS
from penstock_client.cli.connection import PANEL as CONNECTION
from penstock_client.cli.table import PLATFORM_COMMANDS

TARGET = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
KINDS: dict[type, str] = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}
OPENING = """# Command line

`penstock` is one command in two installations. The full one has every command below. The client alone
([its page](../../penstock_client/README.md)) needs none of the platform's packages, and has the commands that only
call the API; the others are marked **full installation**. `penstock --install-completion` installs shell completion,
`--json` prints data as JSON, `--version` the version; `--debug`, before the command, prints tracebacks and retries.

| exit status | meaning |
|---|---|
| 0 | done; of a command that waits for a run: it succeeded |
| 1 | the run, or a check, did not succeed |
| 2 | the command could not do its work; the reason is on standard error |
| 130 | stopped by Ctrl-C |
| 141 | the reader of the output was closed |

A list is a table on a terminal. In a pipe each row is one line, with a heading.

"""
ACCESS = """## Connection

Every command that calls the API has these options. The token is the first of: `--token`, `--token-file`,
`PENSTOCK_TOKEN`, and for an API on this machine the file `penstock/token-PORT` in `XDG_STATE_HOME` (`~/.local/state`),
which its stack writes; that file is refused unless it is yours with mode 0600. The token is sent to the API's own
address alone: no redirect is followed, and a proxy of the environment (`HTTPS_PROXY`) is never used for a loopback
address.

"""


def reference() -> str:
    """The text of docs/reference/cli.md."""
    from deploy.cli.main import app

    group: Any = typer.main.get_command(app)
    panels: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if not command.hidden:
            panels.setdefault(str(command.rich_help_panel or "Others"), []).append(name)
    sections = [OPENING, ACCESS, *_options(_connection_options(group)), "\n"]
    for panel, names in panels.items():
        sections.append(f"## {panel}\n\n")
        for name in names:
            sections += _command(f"penstock {name}", group.commands[name], name in PLATFORM_COMMANDS)
    return "".join(sections).rstrip() + "\n"


def _connection_options(group: Any) -> list[Any]:
    """The options of the connection, as the command `show` has them."""
    names = {option.name for option in OPTIONS}
    return [param for param in group.commands["show"].params if param.name in names]


def _command(name: str, command: Any, full: bool) -> Iterator[str]:
    if hasattr(command, "commands"):
        yield f"### {name}\n\n{_text(command.help)}{_note(full)}\n\n"
        for child, own in command.commands.items():
            yield from _command(f"{name} {child}", own, False)
        return
    connects = any(getattr(param, "rich_help_panel", None) == CONNECTION for param in command.params)
    own = [
        param
        for param in command.params
        if getattr(param, "rich_help_panel", None) != CONNECTION and param.name != "help"
    ]
    arguments = [param for param in own if param.param_type_name == "argument"]
    words = [_word(param) for param in arguments]
    options = [param for param in own if param.param_type_name == "option"]
    tail = [*(["[OPTIONS]"] if options or connects else []), *words]
    yield f"### {name}\n\n```\n{' '.join([name, *tail])}\n```\n\n{_text(command.help)}{_note(full)}\n\n"
    if rows := list(_options([*arguments, *options])):
        yield from [*rows, "\n"]
    if connects:
        yield "And the options of a [connection](#connection).\n\n"


def _word(param: Any) -> str:
    word = str(param.metavar or param.name.upper())
    return word if param.required else f"[{word}]"


def _note(full: bool) -> str:
    return "\n\n**Full installation.**" if full else ""


def _options(params: list[Any]) -> Iterator[str]:
    """A table of arguments and options."""
    if params:
        yield "| | |\n|---|---|\n"
    for param in params:
        notes = [_text(param.help)]
        if getattr(param, "envvar", None):
            notes.append(f"Variable: `{param.envvar}`.")
        if _shown_default(param):
            notes.append(f"Default: `{param.default}`.")
        elif param.required:
            notes.append("Required.")
        yield f"| {_names(param)} | {' '.join(notes)} |\n"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    flags = ", ".join(f"`{name}`" for name in param.opts)
    value = "" if param.is_flag else f" `{param.metavar or KINDS[_kind(param)]}`"
    return flags + value.replace("|", "\\|")


def _kind(param: Any) -> type:
    """The type of an option's value."""
    found = param.type_descriptor.annotation
    return found if isinstance(found, type) else str


def _shown_default(param: Any) -> bool:
    plain = isinstance(param.default, str | int | float | Path) and not isinstance(param.default, bool)
    return plain and param.default != ""


def _text(text: str | None) -> str:
    """The text of a docstring with its line breaks as in Markdown, and without a mark that Markdown would read."""
    return (text or "").strip().replace("|", "\\|").replace("<", "\\<")


def main() -> None:
    """Write docs/reference/cli.md, or with --check exit with status 1 if it differs."""
    text = reference()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != text:
            sys.exit(f"{TARGET.name} differs from the commands; python -m deploy.cli.reference writes it")
        return
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
