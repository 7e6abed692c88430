"""Owns what all sections of a recipe have in common.

Must not hold a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.settings.faults import invalid

MOST_DEPTH = 64
"""Levels of a document: what records and messages hold of it is read again, and readers have limits of their own."""
MOST_NAME, SHOWN_CHARACTERS = 300, 200
"""Of a name in a document; and of what an error shows."""
WHOLE = "text of whole characters"

Positive = Annotated[int, Field(gt=0)]
MOST_REPLICAS = 1024
Replicas = Annotated[int, Field(gt=0, le=MOST_REPLICAS)]
"""Processes of one service of a run, ranks included."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A deadline. No clock or thread can wait much longer than the largest, 30 years."""


class Section(BaseModel):
    """A part of a recipe. Unknown fields are rejected, so that a misspelt setting is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def storable_faults(document: Any) -> Iterator[str]:
    """What no record can hold of a document, whatever its fields are: one line each.

    Python reads more than JSON has: NaN, infinity, and halves of characters. Sections without fields of their own, such
    as the options of a task, are not validated otherwise.
    """
    waiting: list[tuple[str, Any, int]] = [("", document, 0)]
    while waiting:
        field, value, depth = waiting.pop()
        where = field or "recipe"
        if depth > MOST_DEPTH:
            yield f"{where}: too deep: expected at most {MOST_DEPTH} levels"
            return  # a mapping of YAML may contain itself
        elif isinstance(value, dict):
            yield from (fault for name in value if (fault := _name_fault(where, str(name))))
            waiting += [(_below(field, name), part, depth + 1) for name, part in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(_below(field, number), part, depth + 1) for number, part in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield invalid(where, value, "a finite number")
        elif isinstance(value, str) and not _is_whole(value):
            yield invalid(where, value, WHOLE)


def _below(field: str, name: object) -> str:
    """The name of a part, cut: one long name may have many parts."""
    return f"{field}.{str(name)[:SHOWN_CHARACTERS]}".removeprefix(".")[:SHOWN_CHARACTERS]


def _name_fault(where: str, name: str) -> str:
    if len(name) > MOST_NAME:
        return invalid(where, name[:SHOWN_CHARACTERS], f"names of at most {MOST_NAME} characters")
    return "" if _is_whole(name) else invalid(where, name, WHOLE)


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
