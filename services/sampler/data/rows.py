"""Owns a row of a data source, and the errors that name it.

Must not know the meaning of a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.settings.faults import shown

SHOWN = 80  # characters of a faulty value that an error shows


class DataError(ValueError):
    """A data source cannot provide the prompts of the recipe. The text names the setting, the file and the row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row `number`, from 1, of `file`, which is the setting and the path as errors name them."""

    file: str
    number: int
    values: Mapping[str, Any]

    def fault(self, field: str, text: str) -> DataError:
        """The error for one field of this row."""
        return DataError(f"{self.file} row {self.number}: field {field!r}: {text}")

    def get(self, path: str) -> Any:
        """The value at `path`, with dots into nested objects. Raises DataError if it is missing."""
        if path in self.values:
            return self.values[path]
        value: Any = self.values
        for name in path.split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise self.fault(path, f"missing; the row has {', '.join(map(repr, self.values)) or 'no field'}")
            value = value[name]
        return value

    def text(self, path: str) -> str:
        """The text at `path`. Raises DataError unless it is text and not blank."""
        value = self.get(path)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(path, f"{excerpt(value)} is not valid: expected text that is not blank")
        return value

    def answer(self, path: str) -> str:
        """The text or number at `path`, as text. Raises DataError for anything else."""
        value = self.get(path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(path, f"{excerpt(value)} is not valid: expected text or a number")
        return value


def excerpt(value: Any) -> str:
    """A value as errors show it, cut to SHOWN characters."""
    text = shown(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
