"""Owns what all models share.

Must not hold a model of the API.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """An answer, or a part of one. Unknown fields are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)
