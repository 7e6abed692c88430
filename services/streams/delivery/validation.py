"""Owns the check of a stream's entry before it is used: its size, its type, and that it belongs to the run.

Must not talk to Redis, nor judge what a message requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from services.contracts import Batch, Cause, DeadLetter, Message, Sample, Verdict
from services.streams.keys import RunKeys

LARGEST_MESSAGE = 32 * 2**20
"""Bytes. A batch of 512 groups of 16 takes less than 2 MiB."""
LARGEST_LETTER = 32 * 2**10
"""Bytes of a message that a dead letter keeps."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Source:
    """The entry that a dead letter is about: its stream, its id, its content, and how often it was delivered."""

    stream: str
    entry: str
    body: bytes
    deliveries: int = 1


@dataclass(frozen=True)
class Malformed:
    """Why an entry is rejected; and the group and prompt that it is about, if they can be read."""

    reason: str
    group: str | None = None
    prompt: str | None = None

    def letter(self, source: Source) -> DeadLetter:
        """The dead letter of the rejected entry."""
        return make_letter(source, self.reason, Cause.INVALID, self.group, self.prompt)


def make_letter(source: Source, reason: str, cause: Cause, group: str | None, prompt: str | None) -> DeadLetter:
    """A dead letter, which keeps at most LARGEST_LETTER bytes of the message."""
    return DeadLetter(
        stream=source.stream,
        entry=source.entry,
        reason=reason,
        deliveries=source.deliveries,
        cause=cause,
        group=group,
        prompt=prompt,
        body=source.body[:LARGEST_LETTER].decode(errors="replace"),
        size=len(source.body),
        at=time.time(),
    )


def _own_payload(keys: RunKeys, message: Any) -> str | None:
    wanted = keys.payload(message.group, message.index)
    if message.facts.payload != wanted:
        return f"facts.payload: {message.facts.payload!r} is not valid: expected {wanted!r}"
    return None


def _own_batch(keys: RunKeys, batch: Any) -> str | None:
    if not batch.groups:
        return "groups: [] is not valid: expected at least one"
    for group in batch.groups:
        prefix = keys.payload(group.group, 0).removesuffix("0")
        for sample in group.samples:
            if not sample.payload.startswith(prefix):
                return f"payload: {sample.payload!r} is not valid: expected one of group {group.group!r} of this run"
    return None


CHECKS: Mapping[type[Message], Callable[[RunKeys, Any], str | None]] = {
    Sample: _own_payload,
    Verdict: _own_payload,
    Batch: _own_batch,
}
"""By message type: why a message does not belong to the run, or None. Only Redis knows whether its group exists."""


def admit(keys: RunKeys, model: type[M], body: bytes) -> M | Malformed:
    """The message in `body`, or why it is not a valid message of the run."""
    if len(body) > LARGEST_MESSAGE:
        return Malformed(f"{len(body)} bytes; a {model.__name__} has at most {LARGEST_MESSAGE}")
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        return Malformed(f"not a valid {model.__name__}: {where[:200]}: {first['msg'][:300]}")
    check = CHECKS.get(model)
    refusal = check(keys, message) if check else None
    return Malformed(f"not a {model.__name__} of this run: {refusal[:500]}", *origin(message)) if refusal else message


def origin(message: Message) -> tuple[str | None, str | None]:
    """The group and the prompt's id that a message names, each None if it does not."""
    return getattr(message, "group", None), getattr(getattr(message, "prompt", None), "id", None)
