"""Owns the check of a dashboard against Grafana's schema, as the models that Grafana generates from it state it.

Must not talk to a Grafana. The models are those of the release that pyproject.toml names.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

plugins.register_default_plugins()
Json = Any


def faults(document: Json) -> list[str]:
    """What the schema does not allow: unknown fields, and values of another type or outside their list."""
    return list(_of_model(document, models.Dashboard, "dashboard"))


def _encoded(value: Any) -> Json:
    return json.loads(json.dumps(value, cls=JSONEncoder))


def _of_model(value: Json, model: Any, where: str) -> Iterator[str]:
    """Fields that the model drops when it reads them are unknown to it."""
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no {model.__name__}"
        return
    try:
        read = model.from_json(value)
        written = _encoded(read)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield f"{where}: not a {model.__name__}: {type(error).__name__}: {error}"
        return
    yield from _lost(value, written, where)
    yield from _of_object(read, where)


def _lost(value: Json, written: Json, where: str) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(written, dict):
        for name in value:
            if name in written:
                yield from _lost(value[name], written[name], f"{where}.{name}")
            elif value[name] is not None:
                yield f"{where}.{name}: unknown field"
    elif isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        for index, (one, other) in enumerate(zip(value, written, strict=True)):
            yield from _lost(one, other, f"{where}[{index}]")
    elif value != written:
        yield f"{where}: {value!r} is read as {written!r}"


def _of_object(read: Any, where: str) -> Iterator[str]:
    for name, hint in typing.get_type_hints(type(read)).items():
        yield from _of_type(getattr(read, name, None), hint, f"{where}.{name}")


def _of_type(value: Any, hint: Any, where: str) -> Iterator[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if all(list(_of_type(value, part, where)) for part in parts):
            yield from _of_type(value, next(part for part in parts if part is not type(None)), where)
    elif origin is typing.Literal:
        if value not in parts:
            yield f"{where}: {value!r} is not one of {parts}"
    elif origin is list:
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
            return
        for index, item in enumerate(value):
            yield from _of_type(item, parts[0], f"{where}[{index}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{where}: {value!r} is no object"
            return
        for key, item in value.items():
            yield from _of_type(item, parts[1], f"{where}.{key}")
    elif isinstance(hint, type):
        yield from _of_class(value, hint, where)


def _of_class(value: Any, hint: type, where: str) -> Iterator[str]:
    if issubclass(hint, enum.Enum):
        if value not in list(hint) and value not in [entry.value for entry in hint]:
            yield f"{where}: {value!r} is not one of {[entry.value for entry in hint]}"
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{where}: {value!r} is no number"
    elif hint in (int, str, bool, type(None)):
        if type(value) is not hint:
            yield f"{where}: {value!r} is no {hint.__name__}"
    elif isinstance(value, dict) and hasattr(hint, "from_json"):
        yield from _of_model(value, hint, where)
    elif hasattr(value, "to_json"):
        if hint.__module__.startswith("grafana_foundation_sdk.models") and not isinstance(value, hint):
            yield f"{where}: {type(value).__name__} is no {hint.__name__}"
        else:
            yield from _of_object(value, where)
    elif hint is not object:
        yield f"{where}: {value!r} is no {hint.__name__}"
