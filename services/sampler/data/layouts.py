"""Owns the table of row layouts: how a row becomes a chat, a verifier and its reference.

Must not read files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.sampler.data.references import check_json
from services.sampler.data.row_rewards import RowReward, SourceRewards
from services.sampler.data.rows import UNSENDABLE, Columns, Row, RowPlace, excerpt, is_sendable
from services.settings import SourceSettings

METADATA = "metadata"
"""The column of layout `penstock` that rows may have for rewards of the user's own."""

Messages = tuple[dict[str, str], ...]


class Item(NamedTuple):
    """One parsed row. Two rows of the same question conflict unless their `gold` is equal.

    `given`: the value that the row has for its reference, at `place`; generated prompts have neither. `fault`: what is
    expected in place of a value that cannot be a reference; "" if it can, and only then `reference` is one.
    """

    messages: Messages
    verifier: str
    reference: dict[str, Any]
    gold: Any
    metadata: dict[str, Any]
    place: RowPlace | None = None
    given: Any = None
    fault: str = ""

    def unusable(self, fault: str) -> Item:
        """The same row with a value that cannot be a reference. Its gold equals that of no row that has one."""
        return self._replace(reference={}, gold=(excerpt(self.given), fault), fault=fault)


class RowLayout(NamedTuple):
    """The columns that a layout reads, and how it parses a row."""

    columns: Callable[[SourceSettings], Columns]
    read: Callable[[SourceRewards, Row], Item]


class _Given(NamedTuple):
    """What a row gives as its reference: at which field, as which value, and the reference or fault that it becomes."""

    field: str
    value: Any
    reference: dict[str, Any]
    fault: str = ""


class _UnusableError(ValueError):
    """A value that cannot be what its field is for. The text says what is expected."""


def _user(question: str) -> Messages:
    return ({"role": "user", "content": question},)


def _judged_by(row: Row, messages: Messages, reward: RowReward, given: _Given, metadata: dict[str, Any]) -> Item:
    gold, place = (reward.text, given.reference), row.place(given.field)
    item = Item(messages, reward.text, given.reference, gold, metadata, place, given.value)
    missing = [name for name in reward.needed if given.reference.get(name) is None]
    lack = f"expected {', '.join(missing)} for verifier {excerpt(reward.text)}" if missing else ""
    return item.unusable(given.fault or lack) if given.fault or lack else item


def _given(row: Row, field: str, read: Callable[[Any], _Given]) -> _Given:
    """What `read` makes of the value at a field. Raises DataError if the row has no such field."""
    value = row.get(field)
    try:
        return read(value)
    except _UnusableError as error:
        return _Given(field, value, {}, str(error))


def _object(value: Any) -> dict[str, Any]:
    """An object, which may be JSON text, without its nulls: they are columns that only other rows use."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _UnusableError("expected an object, or one as JSON text") from None
    if not isinstance(value, Mapping):
        raise _UnusableError("expected an object")
    return {name: entry for name, entry in value.items() if entry is not None}


def _reference(row: Row, field: str) -> _Given:
    def read(value: Any) -> _Given:
        reference = _object(value)
        return _Given(field, reference, reference)

    return _given(row, field, read)


def _metadata(row: Row, field: str | None) -> dict[str, Any]:
    """The metadata of a row; empty if it has none, which a CSV cell can only say by being blank."""
    value = row.find(field) if field else None
    absent = value is None or (isinstance(value, str) and not value.strip())
    if absent:
        return {}
    try:
        metadata = _object(value)
        check_json(metadata)
    except _UnusableError as error:
        raise row.fault(str(field), f"{excerpt(value)} is not valid: {error}") from None
    except ValueError as error:
        raise row.fault(str(field), f"{excerpt(value)} is not valid: {UNSENDABLE} ({error})") from None
    return metadata


def _chat(row: Row, field: str) -> Messages:
    value = row.get(field)
    wanted = {"role", "content"}
    if not isinstance(value, list) or not value:
        raise row.fault(field, f"{excerpt(value)} is not valid: expected a list of objects with role and content")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in wanted):
            raise row.fault(field, f"message {excerpt(message)} is not valid: expected role and content as text")
        if not is_sendable(message["content"]):
            raise row.fault(field, f"message {excerpt(message)} is not valid: {UNSENDABLE}")
    last = value[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise row.fault(field, f"last message {excerpt(last)} is not valid: expected a user message that is not blank")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _penstock(rewards: SourceRewards, row: Row) -> Item:
    reward = rewards.of_row(row, "verifier")
    messages, metadata = _user(row.text("question")), _metadata(row, METADATA)
    return _judged_by(row, messages, reward, _reference(row, "reference"), metadata)


def _dapo_math(rewards: SourceRewards, row: Row) -> Item:
    given = _bare(row, "reward_model.ground_truth", rewards.own, None)
    return _judged_by(row, _chat(row, "prompt"), rewards.own, given, {})


def _fields(rewards: SourceRewards, row: Row) -> Item:
    fields = rewards.source.fields
    messages = _user(row.text(fields.question)) if fields.question else _chat(row, str(fields.messages))
    reward = rewards.of_row(row, fields.verifier) if fields.verifier else rewards.own
    if fields.reference:
        given = _reference(row, fields.reference)
    else:
        given = _bare(row, str(fields.answer), reward, fields.answer_after)
    return _judged_by(row, messages, reward, given, _metadata(row, fields.metadata))


def _bare(row: Row, field: str, reward: RowReward, mark: str | None) -> _Given:
    """A reference of one answer: a text or a number as text, for rewards of the user's own any value."""
    as_it_is = reward.takes_any_answer and mark is None

    def read(value: Any) -> _Given:
        answer = value if as_it_is else _after(_answer(value), mark)
        return _Given(field, answer, {reward.bare: answer})

    return _given(row, field, read)


def _answer(value: Any) -> str:
    """A text or a number, as text."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _UnusableError("expected text or a number")
    return value


def _after(answer: str, mark: str | None) -> str:
    if mark is None:
        return answer
    _, found, rest = answer.rpartition(mark)
    if not found or not rest.strip():
        raise _UnusableError(f"expected text after {mark!r} (fields.answer_after)")
    return rest.strip()


def _mapped(source: SourceSettings) -> Columns:
    fields = source.fields
    names = (fields.question, fields.messages, fields.answer, fields.verifier, fields.reference, fields.metadata)
    return Columns(tuple(filter(None, names)))


LAYOUTS: Mapping[str, RowLayout] = {
    "penstock": RowLayout(lambda source: Columns(("question", "verifier", "reference"), (METADATA,)), _penstock),
    "dapo-math-17k": RowLayout(lambda source: Columns(("prompt", "reward_model.ground_truth")), _dapo_math),
    "fields": RowLayout(_mapped, _fields),
}
"""By data.layout."""
