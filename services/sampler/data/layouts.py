"""Owns the table of row layouts: how a row becomes a chat, a verifier and its reference.

Must not read files.
"""

from __future__ import annotations

import json
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

    `given`: the value that the row has for its reference, at `place`; generated prompts have neither.
    """

    messages: Messages
    verifier: str
    reference: dict[str, Any]
    gold: Any
    metadata: dict[str, Any]
    place: RowPlace | None = None
    given: Any = None


class RowLayout(NamedTuple):
    """The columns that a layout reads, and how it parses a row."""

    columns: Callable[[SourceSettings], Columns]
    read: Callable[[SourceRewards, Row], Item]


class _Given(NamedTuple):
    """What a row gives as its reference: at which field, as which value, and the reference that this becomes."""

    field: str
    value: Any
    reference: dict[str, Any]


def _user(question: str) -> Messages:
    return ({"role": "user", "content": question},)


def _judged_by(row: Row, messages: Messages, reward: RowReward, given: _Given, metadata: dict[str, Any]) -> Item:
    missing = [name for name in reward.needed if given.reference.get(name) is None]
    if missing:
        expected = f"{', '.join(missing)} for verifier {excerpt(reward.text)}"
        raise row.fault(given.field, f"{excerpt(given.value)} is not valid: expected {expected}")
    gold = (reward.text, given.reference)
    return Item(messages, reward.text, given.reference, gold, metadata, row.place(given.field), given.value)


def _object(row: Row, field: str, value: Any) -> dict[str, Any]:
    """An object, which may be JSON text, without its nulls: they are columns that only other rows use."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise row.fault(field, f"{excerpt(value)} is not valid: expected an object, or one as JSON text") from None
    if not isinstance(value, Mapping):
        raise row.fault(field, f"{excerpt(value)} is not valid: expected an object")
    return {name: entry for name, entry in value.items() if entry is not None}


def _reference(row: Row, field: str) -> _Given:
    reference = _object(row, field, row.get(field))
    return _Given(field, reference, reference)


def _metadata(row: Row, field: str | None) -> dict[str, Any]:
    """The metadata of a row; empty if it has none, which a CSV cell can only say by being blank."""
    value = row.find(field) if field else None
    absent = value is None or (isinstance(value, str) and not value.strip())
    if absent:
        return {}
    metadata = _object(row, str(field), value)
    try:
        check_json(metadata)
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
    answer = row.get(field) if as_it_is else _after(row, field, row.answer(field), mark)
    return _Given(field, answer, {reward.bare: answer})


def _after(row: Row, field: str, answer: str, mark: str | None) -> str:
    if mark is None:
        return answer
    _, found, rest = answer.rpartition(mark)
    if not found or not rest.strip():
        raise row.fault(field, f"{excerpt(answer)} is not valid: expected text after {mark!r} (fields.answer_after)")
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
