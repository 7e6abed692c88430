"""Owns the lines that `penstock verify` reads: a response, its reference, and what else a reward may need.

Must not judge. A reference is read as that of a run's data, so that both have the same form and the same errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from services.sampler.data.layouts import LAYOUTS
from services.sampler.data.row_rewards import RowRewards
from services.sampler.data.rows import DataError, Row, excerpt, json_object
from services.settings import Recipe
from services.settings.data import FieldMapping
from services.settings.rewards.reward import parse_text
from verifier.judging import JudgedText
from verifier.verifiers.base import Candidate

MOST_LINE = 64 << 20
"""Bytes of one line."""
QUESTION = "the row has no prompt"
"""Stands for the prompt of a row without one while the row is read; no reward sees it."""


@dataclass(frozen=True)
class Labelled:
    """Which line a text comes from: its number from 1 and the `id` that it gives, and whether it is called correct."""

    row: int
    name: Any = None
    correct: bool | None = None

    @property
    def place(self) -> dict[str, Any]:
        """What names the line in the output."""
        return {"row": self.row} if self.name is None else {"id": self.name}

    @property
    def where(self) -> str:
        """What names the line for a person."""
        return f"row {self.row}" if self.name is None else f"row {self.row} ({self.name})"


def rows_of(file: BinaryIO, name: str) -> Iterator[Row]:
    """The JSON objects of a file, one per line; blank lines are skipped. Raises DataError, which names the row."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise DataError(f"{name} row {number}: longer than {MOST_LINE} bytes; expected one object per line")
        if line.strip():
            yield Row(name, number, json_object(name, number, line))


class VerifyRows:
    """Reads the rows of `penstock verify`: they may name the rewards that rows of the recipe's data may name."""

    def __init__(self, recipe: Recipe, files: Mapping[str, str]) -> None:
        rewards = RowRewards.of(recipe, files)
        self._rewards = lru_cache(
            lambda fields: rewards.of_source(recipe.data.model_copy(update={"fields": fields}), "data")
        )

    def read(self, row: Row) -> tuple[Labelled, JudgedText]:
        """The text of a row with its reward. Raises DataError for a field that is missing or not valid."""
        response, correct = row.get("response"), row.find("correct")
        if not isinstance(response, str):
            raise row.fault("response", f"{excerpt(response)} is not valid: expected text")
        if correct is not None and not isinstance(correct, bool):
            raise row.fault("correct", f"{excerpt(correct)} is not valid: expected true or false")
        asked = row if row.find("prompt") is not None else Row(row.file, row.number, {**row.values, "prompt": QUESTION})
        item = LAYOUTS["fields"].read(self._rewards(_fields(asked)), asked)
        if item.fault:
            assert item.place is not None, "the rows of files have their places"
            raise item.place.fault(f"{excerpt(item.given)} is not valid: {item.fault}")
        messages = item.messages if asked is row else ()
        text = parse_text(item.verifier), Candidate(response, item.reference, messages, item.metadata)
        return Labelled(row.number, row.find("id"), correct), text


def _fields(row: Row) -> FieldMapping:
    """Which of the forms of a row this one has."""
    as_chat, whole = isinstance(row.find("prompt"), list), row.find("answer") is None and "reference" in row.values
    return FieldMapping(
        question=None if as_chat else "prompt",
        messages="prompt" if as_chat else None,
        answer=None if whole else "answer",
        reference="reference" if whole else None,
        verifier="verifier" if row.find("verifier") is not None else None,
        metadata="metadata",
    )
