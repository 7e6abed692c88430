"""Owns `penstock validate`: it checks a recipe without starting anything, or prints the JSON schema of recipes.

Must not know a setting; services.settings does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.common import reported_errors
from penstock_client.cli.terminal import print_line


def validate(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="Recipe file, YAML or JSON.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes instead.")] = False,
) -> None:
    """Check a recipe, with the files beside it that it names, without starting anything."""
    from deploy.cli.recipe_files import load_with_files
    from services.api.addresses import checked_here
    from services.settings import Recipe, RecipeError

    if schema:
        print_line(json.dumps(Recipe.model_json_schema(), indent=2))
        return
    with reported_errors():
        if recipe is None:
            raise RecipeError("RECIPE: missing: expected a YAML or JSON file, or --schema")
        loaded, files = load_with_files(recipe)
        checked_here(loaded)
        with_files = f", with {', '.join(files)}" if files else ""
        print_line(f"{recipe}: valid; run {loaded.name!r}, {loaded.limits.rollout_steps} rollout steps{with_files}")
