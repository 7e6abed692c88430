"""Owns the texts of validation errors: `FIELD: VALUE is not valid: expected ...`.

Must not validate anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIXED = re.compile(r"\w+ should be (?P<expected>.+)", re.DOTALL)
REQUIRED = re.compile(r"(?P<subject>\w+) should (?P<expected>(?:have|match) .+)", re.DOTALL)
VERBS = {"have": "with", "match": "that matches"}


def invalid(field: str, value: Any, expected: str) -> str:
    """The text of one error; `expected` follows the word "expected"."""
    return f"{field}: {shown(value)} is not valid: expected {expected}"


def shown(value: Any) -> str:
    """A value as recipes write it: null, true and false in place of Python's words."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def explained(field: str, error: Mapping[str, Any]) -> str:
    """One of pydantic's errors about `field`, in the form that this module owns."""
    message = str(error["msg"])
    if error["type"] == "missing":
        return f"{field}: missing: this field is required"
    if error["type"] == "extra_forbidden":
        return invalid(field, error.get("input"), "a known field")
    if error["type"] in ("model_type", "dict_type"):
        return invalid(field, error.get("input"), "a mapping")
    if found := FIXED.fullmatch(message):
        number = "a number " if found["expected"].startswith(("greater", "less")) else ""
        return invalid(field, error.get("input"), number + found["expected"])
    if found := REQUIRED.fullmatch(message):
        expected = re.sub("^(have|match)", lambda verb: VERBS[verb[0]], found["expected"])
        return invalid(field, error.get("input"), f"a {found['subject'].lower()} {expected}")
    return f"{field}: {shown(error.get('input'))} is not valid: {message}"
