"""Owns how runs are shown beside each other.

Must not read Redis.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class DifferenceView(BaseModel):
    """A setting that is not the same in all runs. `values`: by run, without those that lack the setting."""

    path: str
    values: dict[str, Any]


class ComparisonView(BaseModel):
    """Runs beside each other. `curves`: by metric, then by run, one value for each of `steps`; null: it has none.

    `thinned`: there are more steps than points, which were chosen evenly.
    """

    runs: list[str]
    settings: list[DifferenceView]
    steps: list[int]
    curves: dict[str, dict[str, list[float | None]]]
    thinned: bool
