"""Owns how services/settings/engines/known.json is made: names and values of the installed engines' arguments.

Must not be used outside tests. Run it as a program after an upgrade of vLLM or DeepSpeed, and read the differences:
`python -m tests.harness.engine_table`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import annotated_types

from services.settings.engines.values import Accepted

FILE = Path(__file__).parents[2] / "services" / "settings" / "engines" / "known.json"
SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", types.NoneType: "null"}
DEEPSPEED_INT = "whole"
"""DeepSpeed writes its counts as 5e8."""


def accepted(annotation: Any, integer: str = "int") -> Accepted:
    """Which values an annotation allows; empty if that cannot be told. `integer`: the kind that stands for int."""
    kinds, values, items = set(), [], None
    unions = (typing.Union, types.UnionType)
    for part in typing.get_args(annotation) if typing.get_origin(annotation) in unions else (annotation,):
        origin, of = typing.get_origin(part) or part, typing.get_args(part)
        if origin is typing.Literal:
            values += of
        elif isinstance(origin, type) and issubclass(origin, enum.Enum):
            # vLLM accepts the names of its enumerations, and the numbers of those that are numbers.
            values += [member.value if isinstance(member, int) else member.name for member in origin]
        elif origin in SIMPLE:
            kinds.add(integer if origin is int else SIMPLE[origin])
            items = accepted(of[0], integer) if origin is list and of else items
        else:
            return {}
    if values and kinds <= {"null"}:
        return {"values": values + [None] * len(kinds)}
    kinds |= {SIMPLE[type(value)] for value in values}
    return {"kinds": sorted(kinds)} | ({"items": items} if items else {})


def bounds(metadata: Iterable[Any]) -> Accepted:
    """The least and the largest whole number that pydantic's constraints allow."""
    found: Accepted = {}
    for constraint in metadata:
        match constraint:
            case annotated_types.Ge(ge=int(least)):
                found["least"] = least
            case annotated_types.Gt(gt=int(below)):
                found["least"] = below + 1
            case annotated_types.Le(le=int(most)):
                found["most"] = most
    return found


def vllm_arguments() -> dict[str, Accepted]:
    """The fields of AsyncEngineArgs, and those of its sections after a dot.

    Their bounds are those of the configurations that vLLM makes from them.
    """
    from vllm.config import AttentionConfig, CompilationConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    parts: list[Any] = [VllmConfig, *(field.type for field in dataclasses.fields(VllmConfig))]
    limits: dict[str, Accepted] = {}
    for part in parts:
        for name, field in getattr(part, "__pydantic_fields__", {}).items():
            limits[name] = limits.get(name, {}) | bounds(field.metadata)
    found = {
        field.name: _bounded(accepted(field.type), limits.get(field.name, {}))
        for field in dataclasses.fields(AsyncEngineArgs)
    }
    for section, config in {"attention_config": AttentionConfig, "compilation_config": CompilationConfig}.items():
        fields: dict[str, Any] = config.__pydantic_fields__  # type: ignore[attr-defined]
        for name, field in fields.items():
            found[f"{section}.{name}"] = _bounded(accepted(field.annotation), bounds(field.metadata))
    return found


def _bounded(values: Accepted, limits: Accepted) -> Accepted:
    return values | limits if {"int", DEEPSPEED_INT} & {*values.get("kinds", ())} else values


class _Asked(dict[str, Any]):
    """A document that remembers which keys were looked up, and the switches among them: their default is a bool."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, Accepted] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        self.names[key] = {"kinds": ["bool"]} if isinstance(default, bool) else {}
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.names.setdefault(key, {})
        return super().__contains__(key)


def deepspeed_arguments() -> dict[str, Accepted]:
    """The names that DeepSpeed looks up in its document, and the fields of its sections after a dot."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = _Asked()
    DeepSpeedConfig._initialize_params(DeepSpeedConfig.__new__(DeepSpeedConfig), asked)
    found = asked.names
    for section, config in {"comms_logger": CommsLoggerConfig, "zero_optimization": DeepSpeedZeroConfig}.items():
        for name, field in config.model_fields.items():
            values = accepted(field.annotation, DEEPSPEED_INT)
            found[f"{section}.{field.alias or name}"] = _bounded(values, bounds(field.metadata))
    return found


def table() -> dict[str, dict[str, Accepted]]:
    """The arguments of both engines by name, sorted."""
    engines = {"deepspeed": deepspeed_arguments(), "vllm": vllm_arguments()}
    return {engine: dict(sorted(names.items())) for engine, names in engines.items()}


if __name__ == "__main__":
    engines = []
    for engine, names in table().items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in names.items())
        engines.append(f' "{engine}": {{\n{lines}\n }}')
    FILE.write_text("{\n" + ",\n".join(engines) + "\n}\n")
