"""Owns the tables on reference answers as responses: each gold against itself, the others, and a changed one.

Must not judge with options: the golds are written behind a mark or in a box.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from verifier.verifiers.base import UndecidedError
from verifier.verifiers.math.verdict import judge

FORMS = {
    "box": r"So it is \boxed{%s}.",
    "answer line": "So\nAnswer: %s",
    "sentence": "The answer is $%s$. I hope it helps.",
}
OTHERS = 12  # other golds that each gold is compared with
SEED = 1
SHOWN = 12  # of the answers that were judged otherwise than expected

CHANGES: dict[str, Callable[[str], str | None]] = {
    "first number + 1": lambda gold: _replaced(gold, r"\d+", lambda digits: str(int(digits) + 1)),
    "last digit changed": lambda gold: _replaced(
        gold[::-1], r"\d", lambda digit: str((int(digit) + 1) % 10), back=True
    ),
    "sign flipped": lambda gold: None if set(gold) <= set("0.") else gold[1:] if gold.startswith("-") else f"-{gold}",
    "doubled": lambda gold: f"2({gold})" if re.fullmatch(r"[\w\\{}^+\- ]+", gold) and re.search(r"\d", gold) else None,
    "pair swapped": lambda gold: _replaced(gold, r"\(([^(),]+),([^(),]+)\)$", lambda pair: _swapped(pair)),
    "bracket changed": lambda gold: gold[:-1] + "]" if re.fullmatch(r"\([^()\[\]]+,[^()\[\]]+\)", gold) else None,
    "truncated": lambda gold: gold[:-1] if gold.endswith("}") else None,
    "hedged": lambda gold: f"{gold} or 123456",
}
"""By name: a change of a gold that makes it wrong, None where it does not apply."""

SIGN_MATTERS_NOT = re.compile(r"[a-zA-Z]{3,}|\\pm|\\text|=|^[(\\{\[$]|\\begin|^[A-Z]$|_|\\cup|,")
"""Golds whose negative is not written with a minus sign in front."""


def _replaced(gold: str, pattern: str, change: Callable[[str], str], back: bool = False) -> str | None:
    changed = re.sub(pattern, lambda found: change(found[0]), gold, count=1)
    return None if changed == gold else changed[::-1] if back else changed


def _swapped(pair: str) -> str:
    first, _, second = pair[1:-1].partition(",")
    return pair if first.strip() == second.strip() else f"({second},{first})"


def golds(path: Path) -> list[str]:
    """The answers of a JSONL file with the field `answer`."""
    with path.open() as lines:
        return [str(json.loads(line)["answer"]).rpartition("####")[2].strip() for line in lines]


def verdict(response: str, gold: str) -> str:
    """`correct`, `wrong` or `unknown`."""
    try:
        return "correct" if judge(response, {"answer": gold}, {}).correct else "wrong"
    except UndecidedError:
        return "unknown"


def _counted(name: str, found: list[str]) -> str:
    return f"  {name:22} {found.count('correct'):6} correct {found.count('unknown'):4} unknown of {len(found)}"


def table(path: Path) -> Iterator[str]:
    """Lines of the tables on the golds of one file."""
    answers = golds(path)
    yield f"{path.stem}: {len(answers)} golds"
    unexpected: list[str] = []
    for name, form in FORMS.items():
        found = [verdict(form % gold, gold) for gold in answers]
        unexpected += [f"{name}: {gold}" for gold, one in zip(answers, found, strict=True) if one != "correct"]
        yield _counted(f"itself, {name}", found)
    chosen = random.Random(SEED)
    pairs = [(gold, other) for gold in answers for other in chosen.sample(answers, OTHERS) if gold != other]
    for name in ("box", "answer line"):
        found = [verdict(FORMS[name] % other, gold) for gold, other in pairs]
        unexpected += [
            f"{other} for {gold}" for (gold, other), one in zip(pairs, found, strict=True) if one == "correct"
        ]
        yield _counted(f"another, {name}", found)
    for name, change in CHANGES.items():
        applies = [gold for gold in answers if name != "sign flipped" or not SIGN_MATTERS_NOT.search(gold)]
        changed = [(gold, other) for gold in applies if (other := change(gold)) is not None]
        found = [verdict(FORMS["box"] % other, gold) for gold, other in changed]
        unexpected += [f"{name}: {o} for {g}" for (g, o), one in zip(changed, found, strict=True) if one == "correct"]
        yield _counted(name, found)
    yield from (f"    unexpected: {line}" for line in unexpected[:SHOWN])
