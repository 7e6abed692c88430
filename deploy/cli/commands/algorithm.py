"""Owns `penstock algorithm`: the presets, what they set, and where each value comes from.

Must not hold a value; services.settings.presets does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Show the algorithm presets and what differs between them.", no_args_is_help=True)
ABSENT = "-"


@app.command()
def presets() -> None:
    """Print every preset's settings; a recipe that names a preset gets them unless it says otherwise."""
    from services.settings import PRESETS

    _print(_table("Algorithm presets", ["setting", *PRESETS], [
        [path, *(_shown(one[path].value) if path in one else ABSENT for one in PRESETS.values())] for path in _paths()
    ]))  # fmt: skip


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="PRESET")], second: Annotated[str, typer.Argument(metavar="PRESET")]
) -> None:
    """Print what differs between two presets, and which line of the paper or script each value comes from."""
    from services.settings import PRESETS

    for name in (first, second):
        if name not in PRESETS:
            known = ", ".join(PRESETS)
            typer.echo(f"penstock: PRESET: value {name!r} is not accepted; one of {known} is", err=True)
            raise typer.Exit(2)
    one, other = PRESETS[first], PRESETS[second]
    rows = [
        [path, *_told(one.get(path)), *_told(other.get(path))]
        for path in _paths()
        if (path in one or path in other) and (path not in one or path not in other or one[path][0] != other[path][0])
    ]
    _print(
        _table(f"{first} and {second} differ in {len(rows)} settings", ["setting", first, "from", second, "from"], rows)
    )


def _paths() -> list[str]:
    from services.settings import PRESETS

    return list(dict.fromkeys(path for one in PRESETS.values() for path in one))


def _told(setting: Any) -> tuple[str, str]:
    return (_shown(setting.value), setting.source) if setting else (ABSENT, ABSENT)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print(table: Table) -> None:
    from deploy.cli.console import console

    console().print(table)
