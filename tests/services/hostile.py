"""Owns hostile messages for tests: real messages with changed fields, and bytes that are not a message.

Must not be used outside tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from services.contracts import Message

NESTED = json.loads("[" * 150 + "]" * 150)
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    4096,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    -(10**30),
    0.5,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "0",
    "1e5",
    "g0",
    "\x00",
    "é\u2028",
    "x" * 5000,
    "../..",
    "{}",
    [],
    {},
    [[]],
    {"": None},
    NESTED,
    {"kind": "task"},
    "penstock:{another}:payload:g0:0",
    "penstock:{r}:group:g0",
    "verdict",
    "invalid",
    "deliveries",
]
"""Values that replace those of fields."""
RAW: list[bytes] = [
    b"",
    b" ",
    b"null",
    b"true",
    b"0",
    b"[]",
    b"{}",
    b'"task"',
    b"{",
    b"}",
    b"\x00",
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}",
    b"[" * 5000,
    b'{"a":' * 5000,
    b"9" * 5000,
    b'{"kind":"task","kind":"sample"}',
    b'{"kind":"\\ud800"}',
    b"NaN",
    b"\x80" * 100,
    b"kind: task",
]


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a message, including containers; not of the message itself."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def _put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    _at(document, path[:-1])[path[-1]] = value


def _drop(document: Any, path: tuple[Any, ...], _: Any) -> None:
    del _at(document, path[:-1])[path[-1]]


def _add(document: Any, path: tuple[Any, ...], value: Any) -> None:
    place = _at(document, path[:-1])
    place.append(value) if isinstance(place, list) else place.update({"of a newer release": value})


def _double(document: Any, path: tuple[Any, ...], _: Any) -> None:
    place = _at(document, path[:-1])
    place.append(place[path[-1]]) if isinstance(place, list) else None


CHANGES: list[Callable[[Any, tuple[Any, ...], Any], None]] = [_put, _put, _put, _drop, _add, _double]


def damaged(choose: Callable[[Any], Any], raw: bytes) -> bytes:
    """A real message with one or two changes, sometimes truncated, or one of `RAW`; `choose` picks from a sequence."""
    if choose(range(10)) == 0:
        return bytes(choose(RAW))
    document = json.loads(raw) or {"": None}
    for _ in range(choose((1, 2))):
        path = choose(sorted(places(document), key=repr))
        choose(CHANGES)(document, path, deepcopy(choose(VALUES)))
    changed = json.dumps(document).encode()
    return changed[: choose(range(len(changed)))] if choose(range(10)) == 0 else changed


@st.composite
def broken(draw: Any, message: Message) -> bytes:
    """`damaged` with hypothesis' choices, or any bytes."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=64))
    return damaged(lambda options: draw(st.sampled_from(options)), message.model_dump_json().encode())
