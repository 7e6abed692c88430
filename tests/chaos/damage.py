"""Owns the ways to damage payloads and messages, by name.

Must not choose the damage; the strike does, with its seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Damage = Callable[[Any, str, random.Random], bool]


def _overwrite(field: str, change: Callable[[bytes, random.Random], bytes]) -> Damage:
    """Change one field of a payload's hash; False if the payload no longer exists."""

    def damage(server: Any, name: str, rng: random.Random) -> bool:
        value = server.hget(name, field)
        if not value:
            return False
        # Only if it still exists: HSET would create a new payload.
        script = (
            "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end "
            "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) return 1"
        )
        return bool(server.eval(script, 1, name, field, change(value, rng)))

    return damage


def _garbage(value: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(len(value))


def _cut(value: bytes, _: random.Random) -> bytes:
    return value[: len(value) // 2 - 1]


def _nan(value: bytes, _: random.Random) -> bytes:
    return b"\x00\x00\xc0\x7f" + value[4:]


def _not_text(value: bytes, _: random.Random) -> bytes:
    return b"\xff\xfe" + value


PAYLOADS: Mapping[str, Damage] = {
    "response_ids: random bytes": _overwrite("response_ids", _garbage),
    "response_ids: cut": _overwrite("response_ids", _cut),
    "prompt_ids: random bytes": _overwrite("prompt_ids", _garbage),
    "behaviour_logprobs: not a number": _overwrite("behaviour_logprobs", _nan),
    "text: not UTF-8": _overwrite("text", _not_text),
}
"""The ways to damage a payload's hash."""


def _with(**fields: Any) -> Callable[[bytes, random.Random], bytes]:
    def change(body: bytes, _: random.Random) -> bytes:
        return json.dumps({**json.loads(body), **fields}).encode()

    return change


def _truncated(body: bytes, rng: random.Random) -> bytes:
    return body[: rng.randrange(1, len(body))]


def _bytes(body: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(min(200, len(body)))


FOREIGN = {
    "payload": "penstock:{another}:payload:g00000000:0",
    "tokens": 1,
    "advantage": 0.5,
    "reward": 1.0,
    "correct": True,
    "masked": False,
    "staleness": 0,
}

MESSAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncated,
    "random bytes": _bytes,
    "empty": lambda _, __: b"",
    "a list": lambda _, __: b"[1, 2, 3]",
    "of another kind": _with(kind="nonsense"),
    "of an unknown version": _with(schema_version=99),
    "of a wrong type": _with(group={"not": "a name"}, groups="none"),
    "of another run": _with(group="of-another-run", groups=[{"group": "of-another-run", "samples": [FOREIGN]}]),
}
"""The ways to damage a message; the result is never a valid message of this run."""
