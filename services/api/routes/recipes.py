"""Owns the routes that help to write a recipe: its JSON schema, examples, and a check that submits nothing.

Must not store anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from fastapi import APIRouter

from services.api.addresses import checked_addresses
from services.api.dependencies import Viewer
from services.api.views.recipes import CheckRequest, Example, Examples, RecipeCheck
from services.settings import Recipe, RecipeError, check_files, check_reward_limits, check_trackers, parse_recipe
from services.settings.cluster_limits import check_size_limits

RECIPES = "PENSTOCK_RECIPES"
"""The environment variable that names the folder of example recipes."""

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])


@router.get("/schema")
async def show_schema(_: Viewer) -> dict[str, Any]:
    """The JSON schema of a recipe, for editors and forms."""
    return Recipe.model_json_schema()


@router.get("/examples")
def list_examples(_: Viewer) -> Examples:
    """The recipes that this platform comes with, by name; the smallest first."""
    folder = os.environ.get(RECIPES)
    found = (
        [Example(name=path.stem, recipe=_read(path)) for path in sorted(Path(folder).glob("*.yaml"))] if folder else []
    )
    return Examples(examples=sorted(found, key=lambda example: "gpus" in str(example.recipe)))


@router.post("/check")
def check_recipe(_: Viewer, request: CheckRequest) -> RecipeCheck:
    """What is wrong with a recipe, one line per fault, as a submission would answer; nothing is stored."""
    try:
        recipe = checked_addresses(parse_recipe(request.recipe))
        check_files(recipe, request.files)
        check_reward_limits(recipe)
        check_size_limits(recipe)
        check_trackers(recipe)
    except RecipeError as error:
        return RecipeCheck(faults=str(error).split("\n"))
    return RecipeCheck(faults=[])


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found
