"""Owns which keys and arguments a Redis function declares, and their order: both are read from its Lua source.

Must not know what a function does.

A source starts with comments, then `local NAMES = unpack(keys)` and, if there are arguments, `local NAMES =
unpack(args)`. These lines are the only definition of the order; Python passes each value by its name. The name of a key
ends in `_key`, that of a list of keys in `_keys`, that of a list of arguments in `_list`; lists come last. A call sends
the sizes of its lists, so that a function may have several.

A function whose first key is `epoch_key` and whose first argument is `fence` is fenced: the library checks the fence
before the function's own text. Where a fence is optional, the text checks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_NAMES = r"local\s+(\w+(?:,\s*\w+)*)\s*=\s*unpack\({}\)\n"
_HEADER = re.compile(rf"(?:--.*\n)*{_NAMES.format('keys')}(?:{_NAMES.format('args')})?(.*)", re.S)
_LIST_TYPES = (list, tuple)
_WRONG_KEY = "ends in neither _key nor _keys"
_LATE_SINGLE = "follows a list; lists come last"


class SignatureError(TypeError):
    """A function's source does not declare its names as it must, or a call does not pass exactly these names."""


@dataclass(frozen=True)
class Signature:
    """The names that function `function` declares, in the order of its source: single values first, then lists."""

    function: str
    keys: tuple[str, ...]
    key_lists: tuple[str, ...]
    args: tuple[str, ...]
    arg_lists: tuple[str, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All declared names."""
        return self.keys + self.key_lists + self.args + self.arg_lists

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def _lists(self) -> frozenset[str]:
        return frozenset(self.key_lists + self.arg_lists)

    @property
    def has_lists(self) -> bool:
        """Whether a call sends sizes of lists before its arguments."""
        return bool(self.key_lists or self.arg_lists)

    @property
    def is_fenced(self) -> bool:
        """Whether only the role's owner may call it."""
        return (self.keys[:1], self.args[:1]) == (("epoch_key",), ("fence",))

    def order(self, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """The keys and arguments of a call as `FCALL` sends them. Raises SignatureError for missing or unknown names,
        and for a list where the source declares a single value, or the reverse.
        """
        self._check(values)
        if not self.has_lists:
            return [values[name] for name in self.keys], [values[name] for name in self.args]
        lists = [values[name] for name in self.key_lists + self.arg_lists]
        keys, rest = lists[: len(self.key_lists)], lists[len(self.key_lists) :]
        return (
            [values[name] for name in self.keys] + _flat(keys),
            [len(values) for values in lists] + [values[name] for name in self.args] + _flat(rest),
        )

    def _check(self, values: Mapping[str, Any]) -> None:
        if values.keys() != self._names:
            missing = [name for name in self.names if name not in values]
            unknown = [name for name in values if name not in self.names]
            faults = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
            raise SignatureError(
                f"Redis function {self.function}: {', '.join(faults)}; it declares {', '.join(self.names)}"
            )
        for name, value in values.items():
            if value is None or (value.__class__ in _LIST_TYPES) != (name in self._lists):
                expected = "a list" if name in self._lists else "a single value"
                raise SignatureError(f"Redis function {self.function}: {name}: expected {expected}, got {value!r:.80}")


def parse_signature(function: str, source: str) -> Signature:
    """What a Lua source declares. Raises SignatureError."""
    found = _HEADER.fullmatch(source)
    if found is None:
        raise SignatureError(
            f"Redis function {function}: expected comments, then `local NAMES = unpack(keys)` and at most one "
            "`local NAMES = unpack(args)`"
        )
    keys, args = _names(found[1]), _names(found[2])
    for name in keys:
        if not name.endswith(("_key", "_keys")):
            raise SignatureError(f"Redis function {function}: the key {name} {_WRONG_KEY}")
    doubled = {name for name in keys + args if (keys + args).count(name) > 1}
    if doubled:
        raise SignatureError(f"Redis function {function}: {', '.join(sorted(doubled))} is declared twice")
    if re.search(r"\b(keys|args)\b", found[3]):
        raise SignatureError(f"Redis function {function}: its body uses `keys` or `args`; expected declared names")
    return Signature(function, *_split(function, keys, "_keys"), *_split(function, args, "_list"))


def _names(text: str | None) -> list[str]:
    return re.split(r",\s*", text) if text else []


def _split(function: str, names: list[str], suffix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of single values, and those of lists."""
    singles = [name for name in names if not name.endswith(suffix)]
    for name in names[len(singles) :]:
        if name in singles:
            raise SignatureError(f"Redis function {function}: {name} {_LATE_SINGLE}")
    return tuple(singles), tuple(names[len(singles) :])


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]
