"""Owns the table on solutions with labels: other models' solutions of GSM8K, judged as they are and with other marks.

Must not trust the labels: the table counts disagreements, and lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.verifier.verdicts.golds import verdict

LAST = re.compile(r"\nA: *([^\n]*)\s*$")
MARKS = {
    "as it is": None,
    "#### 26": "\n#### %s",
    "Answer: 26": "\nAnswer: %s",
    "sentence": "\nThe answer is %s.",
    "box": "\n\\boxed{%s}",
}
"""By name: what replaces the last line `A: 26`."""

SHOWN = 12


def solutions(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Text, gold and label of each solution. A line is a problem with `ground_truth` and solutions by model."""
    with path.open() as lines:
        for line in lines:
            problem: dict[str, Any] = json.loads(line)
            gold = str(problem["ground_truth"]).rpartition("A:")[2].strip()
            for field in problem.values():
                if isinstance(field, dict) and "is_correct" in field:
                    yield str(field["solution"]), gold, bool(field["is_correct"])


def table(path: Path) -> Iterator[str]:
    """Lines of the table on the solutions of one file."""
    rows = list(solutions(path))
    yield f"{path.stem}: {len(rows)} solutions, {sum(label for _, _, label in rows)} labelled correct"
    for name, mark in MARKS.items():
        differing = []
        for text, gold, label in rows:
            ending = LAST.search(text)
            response = text if mark is None or ending is None else text[: ending.start()] + mark % ending[1]
            if (verdict(response, gold) == "correct") != label:
                differing.append(f"{text[-40:]!r} for {gold}, labelled {label}")
        yield f"  {name:12} {len(differing):4} disagreements"
        yield from (f"    {line}" for line in differing[:SHOWN])
