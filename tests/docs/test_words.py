"""Code, texts and documentation do not use the words that the glossary and plain English replaced."""

from __future__ import annotations

import re

from tests.house.figures import ROOT, tracked

INSTEAD = {
    "anew": "again",
    "whoever": "the component's name",
    "somebody": "the component's name",
    "nobody": "no component, none, not",
    "under way": "in flight, running",
    "made good": "recovered",
    "let go of": "release",
    "give up": "abandon, dead-letter, fail",
    "given up": "abandoned, dead-lettered, failed",
    "gives up": "abandons, fails",
    "gave up": "abandoned, failed",
    "takes it on": "continues it",
    "taken back": "rewound",
    "is not accepted": "is not valid: expected",
    "how-manieth": "ordinal",
    "for want of": "for lack of",
    "lays down": "writes",
    "come to an end": "end, finish",
}
"""Each rejected word, and what to write instead."""
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".tpl", ".lua", ".sh", ".toml", ".txt", ".json", "Makefile", "Dockerfile")
OWN = "tests/docs/test_words.py"


def test_refused_words_are_gone() -> None:
    pattern = re.compile(rf"(?<![a-z0-9-])({'|'.join(map(re.escape, INSTEAD))})(?![a-z0-9-])", re.I)
    found = [
        f"{path}:{number}: {match[0]}: write {INSTEAD[match[0].lower()]}"
        for path in tracked()
        if path.endswith(SUFFIXES) and path != OWN and "/results/" not in path
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        for match in pattern.finditer(line.replace("_", " "))  # names too, such as give_up
    ]
    assert found == []
