"""Owns the schemas of the routes that help to write a recipe.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class CheckRequest(BaseModel):
    """A recipe to check, with the texts of the files beside it."""

    model_config = ConfigDict(extra="forbid")

    recipe: dict[str, Any]
    files: dict[str, str] = Field(default_factory=dict)


class RecipeCheck(BaseModel):
    """One line per fault, each of which starts with the field; none for a valid recipe."""

    faults: list[str]


class Example(BaseModel):
    """A recipe that comes with the platform."""

    name: str
    recipe: dict[str, Any]


class Examples(BaseModel):
    """All of them."""

    examples: list[Example]
