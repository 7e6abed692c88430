"""Owns a row of a data source, and the errors that name it.

Must not know the meaning of a field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.settings.faults import shown

UNSENDABLE = "expected JSON values, and text that UTF-8 can encode"
"""What a value that messages cannot carry is not."""
JSON_KINDS = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
SHOWN = 80  # characters of a faulty value that an error shows


class DataError(ValueError):
    """A data source cannot provide the prompts of the recipe. The text names the setting, the file and the row."""


class Columns(NamedTuple):
    """The columns that a layout reads, nested ones with dots. A source may lack the optional ones."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


class RowPlace(NamedTuple):
    """Where a value is: the setting and the path as errors name them, the row's number from 1, and its field."""

    file: str
    row: int
    field: str

    def fault(self, text: str) -> DataError:
        """The error for the value here."""
        return DataError(f"{self.file} row {self.row}: field {self.field!r}: {text}")


@dataclass(frozen=True, slots=True)
class Row:
    """Row `number`, from 1, of `file`, which is the setting and the path as errors name them."""

    file: str
    number: int
    values: Mapping[str, Any]

    def fault(self, field: str, text: str) -> DataError:
        """The error for one field of this row."""
        return self.place(field).fault(text)

    def place(self, field: str) -> RowPlace:
        """Where the value of one field of this row is."""
        return RowPlace(self.file, self.number, field)

    def find(self, path: str) -> Any:
        """The value at `path` as `get` gives it, or None if it is missing."""
        value: Any = self.values
        if path in self.values:
            return self.values[path]
        for name in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

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
        if not is_sendable(value):
            raise self.fault(path, f"{excerpt(value)} is not valid: {UNSENDABLE}")
        return value


def is_sendable(text: str) -> bool:
    """Whether messages can carry the text: JSON's escapes can write half of a character, which has no form in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def excerpt(value: Any) -> str:
    """A value as errors show it, cut to SHOWN characters."""
    text = shown(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def json_object(name: str, number: int, line: bytes) -> Mapping[str, Any]:
    """The JSON object on line `number` of the file that errors call `name`. Raises DataError."""
    try:
        values = json.loads(line)
    except RecursionError:
        raise DataError(f"{name} row {number}: nested too deeply; expected one object per line") from None
    except ValueError as error:
        raise DataError(f"{name} row {number}: not JSON ({error}); expected one object per line") from None
    if not isinstance(values, dict):
        kind = JSON_KINDS[type(values)]
        raise DataError(f"{name} row {number}: it is {kind}, which is not valid: expected an object")
    return values
