"""Owns how services/settings/engines/known.json is made: names and types of the installed engines' arguments.

Must not be used outside tests. Run it as a program after an upgrade of vLLM or DeepSpeed, and read the differences:
`python -m tests.harness.engine_table`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "services" / "settings" / "engines" / "known.json"
SIMPLE = {"bool": "bool", "int": "int", "float": "float", "str": "str", "None": "null"}


def kinds(annotation: str) -> list[str]:
    """The kinds of values that an annotation allows; empty if that cannot be read from its text."""
    found = set()
    for part in re.sub(r"\[.*\]", "[]", annotation.replace("typing.", "")).split("|"):
        name = part.strip()
        if name in ("dict[]", "list[]"):
            name = name[:-2]
        elif name not in SIMPLE:
            return []
        found.add(SIMPLE.get(name, name))
    return sorted(found)


def vllm_arguments() -> dict[str, list[str]]:
    """The fields of AsyncEngineArgs."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {
        field.name: kinds(getattr(field.type, "__name__", str(field.type)))
        for field in dataclasses.fields(AsyncEngineArgs)
    }


class _Asked(dict[str, Any]):
    """A document that remembers which keys were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.names.add(key)
        return super().__contains__(key)


def deepspeed_arguments() -> dict[str, list[str]]:
    """The names that DeepSpeed looks up in its document, and the fields of zero_optimization after a dot."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked = _Asked()
    DeepSpeedConfig._initialize_params(DeepSpeedConfig.__new__(DeepSpeedConfig), asked)
    found: dict[str, list[str]] = {name: [] for name in asked.names}
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        plain = getattr(field.annotation, "__name__", "") if "[" not in str(field.annotation) else ""
        # DeepSpeed writes its counts as 5e8.
        allowed = ["float", "int"] if plain == "int" else kinds(plain)
        found[f"zero_optimization.{field.alias or name}"] = allowed
    return found


def table() -> dict[str, dict[str, list[str]]]:
    """The arguments of both engines by name, sorted."""
    engines = {"deepspeed": deepspeed_arguments(), "vllm": vllm_arguments()}
    return {engine: dict(sorted(names.items())) for engine, names in engines.items()}


if __name__ == "__main__":
    lines = json.dumps(table(), indent=1)
    FILE.write_text(re.sub(r"\[\s+([^\]]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", lines) + "\n")
