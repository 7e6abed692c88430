"""Owns what all sections of a recipe have in common.

Must not hold a setting.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of a recipe. Unknown fields are rejected, so that a misspelt setting is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
