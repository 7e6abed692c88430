"""Owns what all sections of a recipe have in common.

Must not hold a setting.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A deadline. No clock or thread can wait much longer than the largest, 30 years."""


class Section(BaseModel):
    """A part of a recipe. Unknown fields are rejected, so that a misspelt setting is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
