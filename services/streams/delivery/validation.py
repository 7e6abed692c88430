"""Owns what a stream's entry must be to be let in: of bearable size, of its type, and of this run.

Must not talk to Redis, nor judge what a message asks for.
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
"""Bytes of a message that a dead letter keeps; what is longer cannot be delivered again."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Malformed:
    """Why an entry is not let in, and what it says of its origin as far as that can be read."""

    reason: str
    group: str | None = None
    prompt: str | None = None

    def letter(self, stream: str, entry: str, body: bytes, deliveries: int) -> DeadLetter:
        """The dead letter that tells of it."""
        return make_letter(stream, entry, body, self.reason, deliveries, Cause.INVALID, self.group, self.prompt)


def make_letter(
    stream: str, entry: str, body: bytes, reason: str, deliveries: int, cause: Cause, group: str | None,
    prompt: str | None,
) -> DeadLetter:  # fmt: skip
    """A dead letter of a message, of which at most LARGEST_LETTER bytes are kept."""
    return DeadLetter(
        stream=stream, entry=entry, reason=reason, deliveries=deliveries, cause=cause, group=group, prompt=prompt,
        body=body[:LARGEST_LETTER].decode(errors="replace"), size=len(body), at=time.time(),
    )  # fmt: skip


def _own_payload(keys: RunKeys, message: Any) -> str | None:
    wanted = keys.payload(message.group, message.index)
    if message.facts.payload != wanted:
        return f"facts.payload: {message.facts.payload!r} is not accepted; {wanted!r} is"
    return None


def _own_batch(keys: RunKeys, batch: Any) -> str | None:
    if not batch.groups:
        return "groups: none; at least one is needed"
    for group in batch.groups:
        prefix = keys.payload(group.group, 0).removesuffix("0")
        for sample in group.samples:
            if not sample.payload.startswith(prefix):
                return f"payload: {sample.payload!r} is not one of group {group.group!r} of this run"
    return None


CHECKS: Mapping[type[Message], Callable[[RunKeys, Any], str | None]] = {
    Sample: _own_payload,
    Verdict: _own_payload,
    Batch: _own_batch,
}
"""By message type: why a message is not one of this run, or None. Whether its group exists, only Redis can tell."""


def admit(keys: RunKeys, model: type[M], body: bytes) -> M | Malformed:
    """The message in `body`, or why it is none of run `keys`."""
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
    """The group and the prompt's id that a message is about, where it names them."""
    return getattr(message, "group", None), getattr(getattr(message, "prompt", None), "id", None)
