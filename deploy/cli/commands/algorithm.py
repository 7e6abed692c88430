"""Owns `penstock algorithm`: the presets, what they set, and where each value comes from.

Must not hold a value; services.settings.presets does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock_client.cli.commands.arguments import OwnJsonOption
from penstock_client.cli.reporting import fail
from penstock_client.cli.terminal import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Show the algorithm presets and how they differ.", no_args_is_help=True)
ABSENT = "-"

PresetArgument = Annotated[str, typer.Argument(metavar="PRESET", help="Name of a preset.")]


@app.command()
def presets(as_json: OwnJsonOption = False) -> None:
    """Print the settings of every preset. A recipe can override each setting of the preset that it names."""
    from services.settings import PRESETS

    if as_json:
        print_json({name: {path: preset[path].value for path in preset} for name, preset in PRESETS.items()})
        return
    rows = [
        [path, *(_shown(preset[path].value) if path in preset else ABSENT for preset in PRESETS.values())]
        for path in _paths()
    ]
    console().print(_table("Algorithm presets", ["setting", *PRESETS], rows))


@app.command()
def diff(first: PresetArgument, second: PresetArgument, as_json: OwnJsonOption = False) -> None:
    """Print how two presets differ, and which line of the paper or script each value comes from."""
    from services.settings import PRESETS

    for name in (first, second):
        if name not in PRESETS:
            fail(f"PRESET: {name!r} is not valid: expected one of {', '.join(PRESETS)}")
    left, right = PRESETS[first], PRESETS[second]
    differing = [
        path
        for path in _paths()
        if (path in left or path in right)
        and (path not in left or path not in right or left[path][0] != right[path][0])
    ]
    if as_json:
        named = {first: left, second: right}
        print_json({path: {name: _document(preset.get(path)) for name, preset in named.items()} for path in differing})
        return
    rows = [[path, *_value_and_source(left.get(path)), *_value_and_source(right.get(path))] for path in differing]
    title = f"{first} and {second} differ in {len(rows)} settings"
    console().print(_table(title, ["setting", first, "from", second, "from"], rows))


def _paths() -> list[str]:
    from services.settings import PRESETS

    return list(dict.fromkeys(path for preset in PRESETS.values() for path in preset))


def _document(setting: Any) -> dict[str, Any] | None:
    return {"value": setting.value, "source": setting.source} if setting else None


def _value_and_source(setting: Any) -> tuple[str, str]:
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
