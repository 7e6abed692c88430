"""Metrics, API fields, settings and events use the glossary's words, and none of their synonyms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from services.api.app import create_app
from services.contracts import Message
from services.contracts.events import COMMON_PHASES, PHASES
from services.metrics import families
from services.settings import Recipe
from services.streams.delivery.payloads import SamplePayload
from tests.harness.api_access import ACCESS
from tests.harness.documented_commands import COMMANDS

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PACKAGES = ("services", "rollout", "verifier", "learner", "deploy")
ROW = re.compile(r"^\| ([a-z][a-z -]+) \| (.+) \| (.+) \|$", re.M)
WORDS = 33


def rows() -> list[tuple[str, str, str]]:
    """Word, meaning, and its names elsewhere."""
    return [(word, meaning, elsewhere) for word, meaning, elsewhere in ROW.findall(GLOSSARY.read_text())][1:]


def property_names(schema: Any) -> set[str]:
    """The names of all properties in a JSON schema, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(property_names, schema))
    if not isinstance(schema, dict):
        return set()
    own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return own.union(*map(property_names, schema.values()))


def names() -> dict[str, set[str]]:
    """The names that users see, by area."""
    metrics = {name for family in families() for name in (family._name, *family._labelnames)}
    openapi = create_app(None, ACCESS).openapi()  # type: ignore[arg-type]
    return {
        "metrics": metrics,
        "API": property_names(openapi["components"]),
        "routes": set(openapi["paths"]),
        "settings": property_names(Recipe.model_json_schema()),
        "events": {*COMMON_PHASES, *(phase for phases in PHASES.values() for phase in phases)},
    }


def tokens(name: str) -> str:
    """The words of a name, between spaces."""
    return f" {' '.join(re.findall('[a-z0-9]+', name.lower()))} "


def is_used(word: str, found: str) -> bool:
    """Whether the words of a name contain this word, in the singular or plural."""
    plain = " ".join(re.findall("[a-z]+", word))
    return f" {plain} " in found or f" {plain}s " in found or f" {plain}es " in found


def test_the_glossary_has_its_words_in_order() -> None:
    words = [word for word, *_ in rows()]
    assert len(words) == WORDS
    assert words == sorted(set(words))


def test_every_word_is_used_in_a_name() -> None:
    modules = [str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    fields = [field for message in (*Message.__subclasses__(), SamplePayload) for field in message.__annotations__]
    found = [tokens(name) for area in (*names().values(), COMMANDS, modules, fields) for name in area]
    unused = [word for word, *_ in rows() if not any(is_used(word, name) for name in found)]
    assert unused == []


def test_no_name_uses_a_synonym() -> None:
    refused = [synonym for *_, elsewhere in rows() for synonym in re.findall("`([^`]+)`", elsewhere)]
    assert len(refused) >= WORDS / 2
    used = {
        (area, name, synonym)
        for area, found in names().items()
        for name in found
        for synonym in refused
        if is_used(synonym, tokens(name))
    }
    assert used == set()


def test_only_streams_have_a_lag() -> None:
    lagging = {name for area in names().values() for name in area if is_used("lag", tokens(name))}
    assert {name for name in lagging if not is_used("stream", tokens(name))} == set()
