"""Owns what a row's fields mean: the table of layouts, from a row to a chat, a verifier and its reference.

Must not read files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.sampler.data.rows import Row, shown
from services.settings import SourceSettings

REFERENCES: Mapping[str, tuple[str, ...]] = {
    "reasoning-gym": ("task", "entry"),
    "math": ("answer",),
    "answer-line": ("answer",),
    "pattern": ("pattern",),
}
"""By verifier: what its reference must hold. Where a row gives a bare answer, it is the first of these."""

Messages = tuple[dict[str, str], ...]


class Item(NamedTuple):
    """One row, understood. `gold` is what two rows of one question must have in common."""

    messages: Messages
    verifier: str
    reference: dict[str, Any]
    gold: Any


class Layout(NamedTuple):
    """Which columns a layout needs, dotted into nested ones, and how it reads a row."""

    columns: Callable[[SourceSettings], tuple[str, ...]]
    read: Callable[[SourceSettings, Row], Item]


def _user(question: str) -> Messages:
    return ({"role": "user", "content": question},)


def _judged_by(row: Row, messages: Messages, verifier: str, reference: dict[str, Any], field: str) -> Item:
    lacking = [name for name in REFERENCES[verifier] if reference.get(name) is None]
    if lacking:
        expected = f"{', '.join(lacking)} for verifier {verifier!r}"
        raise row.fault(field, f"{shown(reference)} is not valid: expected {expected}")
    return Item(messages, verifier, reference, (verifier, reference))


def _verifier(row: Row, field: str) -> str:
    name = row.text(field)
    if name not in REFERENCES:
        raise row.fault(field, f"{name!r} is not valid: expected one of {', '.join(sorted(REFERENCES))}")
    return name


def _reference(row: Row, field: str) -> dict[str, Any]:
    """An object, or one written as JSON text; what is null in it (a column that other rows use) is left out."""
    value = row.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise row.fault(field, f"{shown(value)} is not valid: expected an object, or one as JSON text") from None
    if not isinstance(value, Mapping):
        raise row.fault(field, f"{shown(value)} is not valid: expected an object")
    return {name: one for name, one in value.items() if one is not None}


def _chat(row: Row, field: str) -> Messages:
    value = row.get(field)
    wanted = {"role", "content"}
    if not isinstance(value, list) or not value:
        raise row.fault(field, f"{shown(value)} is not valid: expected a list of objects with role and content")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in wanted):
            raise row.fault(field, f"message {shown(message)} is not valid: expected a text role and a text content")
    last = value[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise row.fault(field, f"last message {shown(last)} is not valid: expected one of the user that is not blank")
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
        raise row.fault(field, f"{shown(answer)} is not valid: expected text after {mark!r} (fields.answer_after)")
    return rest.strip()


def _mapped(source: SourceSettings) -> tuple[str, ...]:
    fields = source.fields
    return tuple(filter(None, (fields.question, fields.messages, fields.answer, fields.verifier, fields.reference)))


LAYOUTS: Mapping[str, Layout] = {
    "penstock": Layout(lambda source: ("question", "verifier", "reference"), _penstock),
    "dapo-math-17k": Layout(lambda source: ("prompt", "reward_model.ground_truth"), _dapo_math),
    "fields": Layout(_mapped, _fields),
}
"""By data.layout."""
