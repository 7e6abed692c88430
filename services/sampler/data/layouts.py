"""Owns the table of row layouts: how a row becomes a chat, a verifier and its reference.

Must not read files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.sampler.data.rows import Row, excerpt
from services.settings import SourceSettings

REFERENCES: Mapping[str, tuple[str, ...]] = {
    "reasoning-gym": ("task", "entry"),
    "math": ("answer",),
    "answer-line": ("answer",),
    "pattern": ("pattern",),
}
"""By verifier: the keys of its reference. If a row has a bare answer, it becomes the first of them."""

Messages = tuple[dict[str, str], ...]


class Item(NamedTuple):
    """One parsed row. Two rows of the same question conflict unless their `gold` is equal."""

    messages: Messages
    verifier: str
    reference: dict[str, Any]
    gold: Any


class RowLayout(NamedTuple):
    """The columns that a layout needs (nested ones with dots), and how it parses a row."""

    columns: Callable[[SourceSettings], tuple[str, ...]]
    read: Callable[[SourceSettings, Row], Item]


def _user(question: str) -> Messages:
    return ({"role": "user", "content": question},)


def _judged_by(row: Row, messages: Messages, verifier: str, reference: dict[str, Any], field: str) -> Item:
    missing = [name for name in REFERENCES[verifier] if reference.get(name) is None]
    if missing:
        expected = f"{', '.join(missing)} for verifier {verifier!r}"
        raise row.fault(field, f"{excerpt(reference)} is not valid: expected {expected}")
    return Item(messages, verifier, reference, (verifier, reference))


def _verifier(row: Row, field: str) -> str:
    name = row.text(field)
    if name not in REFERENCES:
        raise row.fault(field, f"{name!r} is not valid: expected one of {', '.join(sorted(REFERENCES))}")
    return name


def _reference(row: Row, field: str) -> dict[str, Any]:
    """The object at `field`, which may be JSON text, without its nulls: they are columns that only other rows use."""
    value = row.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise row.fault(field, f"{excerpt(value)} is not valid: expected an object, or one as JSON text") from None
    if not isinstance(value, Mapping):
        raise row.fault(field, f"{excerpt(value)} is not valid: expected an object")
    return {name: entry for name, entry in value.items() if entry is not None}


def _chat(row: Row, field: str) -> Messages:
    value = row.get(field)
    wanted = {"role", "content"}
    if not isinstance(value, list) or not value:
        raise row.fault(field, f"{excerpt(value)} is not valid: expected a list of objects with role and content")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in wanted):
            raise row.fault(field, f"message {excerpt(message)} is not valid: expected role and content as text")
    last = value[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise row.fault(field, f"last message {excerpt(last)} is not valid: expected a user message that is not blank")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _penstock(source: SourceSettings, row: Row) -> Item:
    verifier = _verifier(row, "verifier")
    return _judged_by(row, _user(row.text("question")), verifier, _reference(row, "reference"), "reference")


def _dapo_math(source: SourceSettings, row: Row) -> Item:
    answer = {REFERENCES[source.verifier][0]: row.answer("reward_model.ground_truth")}
    return _judged_by(row, _chat(row, "prompt"), source.verifier, answer, "reward_model.ground_truth")


def _fields(source: SourceSettings, row: Row) -> Item:
    fields = source.fields
    messages = _user(row.text(fields.question)) if fields.question else _chat(row, str(fields.messages))
    verifier = _verifier(row, fields.verifier) if fields.verifier else source.verifier
    if fields.reference:
        return _judged_by(row, messages, verifier, _reference(row, fields.reference), fields.reference)
    field = str(fields.answer)
    answer = _after(row, field, row.answer(field), fields.answer_after)
    return _judged_by(row, messages, verifier, {REFERENCES[verifier][0]: answer}, field)


def _after(row: Row, field: str, answer: str, mark: str | None) -> str:
    if mark is None:
        return answer
    _, found, rest = answer.rpartition(mark)
    if not found or not rest.strip():
        raise row.fault(field, f"{excerpt(answer)} is not valid: expected text after {mark!r} (fields.answer_after)")
    return rest.strip()


def _mapped(source: SourceSettings) -> tuple[str, ...]:
    fields = source.fields
    return tuple(filter(None, (fields.question, fields.messages, fields.answer, fields.verifier, fields.reference)))


LAYOUTS: Mapping[str, RowLayout] = {
    "penstock": RowLayout(lambda source: ("question", "verifier", "reference"), _penstock),
    "dapo-math-17k": RowLayout(lambda source: ("prompt", "reward_model.ground_truth"), _dapo_math),
    "fields": RowLayout(_mapped, _fields),
}
"""By data.layout."""
