"""docs/architecture.md: at most fifteen files, each of which exists, and message bodies with the current fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from services.contracts.base import Message, Value

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES = 15


def models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Every message, and every model inside a message."""
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def test_the_page_names_at_most_fifteen_existing_files() -> None:
    files = re.findall(r"^\| \d+ \| `(.+?)` \|", PAGE, re.M)
    assert 0 < len(files) <= FILES
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_bodies_have_the_fields_of_messages() -> None:
    known = {field for base in (Message, Value) for model in models(base) for field in model.model_fields}
    bodies = [body for body in re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S) if '"kind"' in body]
    assert len(bodies) >= 6
    fields = {field for body in bodies for field in re.findall(r'"(\w+)": ', body)}
    free = {"role", "content", "task", "accuracy", "groups_filtered", "entropy", "ratio_mean", "rollout-7d1b58cf"}
    assert fields - known - free == set()
