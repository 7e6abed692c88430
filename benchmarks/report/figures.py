"""Owns figures: the values of repeated measurements, their median and spread, and the target that they are held to.

Must not print or write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a figure's median is held to: `least` <= median <= `most`, each if given."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        """Whether `value` is within the bounds."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        bounds = ((">=", self.least), ("<=", self.most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Figure:
    """One measured quantity. `values`: one per repeat, in the order in which they were measured; at least one.

    `unit` is empty for a ratio.
    """

    name: str
    values: tuple[float, ...]
    unit: str = ""
    target: Target | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"figure {self.name!r}: no values: expected at least one")

    @property
    def median(self) -> float:
        """The median of the values."""
        return median(self.values)

    @property
    def missed(self) -> bool:
        """Whether there is a target and the median is outside it."""
        return self.target is not None and not self.target.met(self.median)

    def row(self) -> dict[str, Any]:
        """What the JSON says of this figure."""
        spread = {"min": min(self.values), "median": self.median, "max": max(self.values)}
        target = {} if self.target is None else {"target": str(self.target), "met": not self.missed}
        return {"name": self.name, "unit": self.unit, "values": list(self.values)} | spread | target


def ratio(name: str, above: Sequence[float], below: Sequence[float], target: Target | None = None) -> Figure:
    """The ratios of two measurements of the same repeats: above[i] / below[i].

    Raises ValueError if their numbers differ.
    """
    return Figure(name, tuple(a / b for a, b in zip(above, below, strict=True)), "", target)
