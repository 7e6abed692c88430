"""Owns the texts that the verifier's benchmark judges.

Must not judge.
"""

from __future__ import annotations

import random

from services.settings.rewards.reward import Reward, parse_text
from verifier.verifiers.base import Candidate

MATH, PATTERN = parse_text("math"), parse_text("pattern")
HANG = PATTERN, Candidate("a" * 60 + "b", {"pattern": "(a+)+$"})
"""A text that is not judged within hours."""
WORKING = (
    "We add the two numbers and subtract what was given away, which leaves the rest. "
    "Then each of the remaining boxes is counted again, and the sum is taken.\n"
)
FORMULAS = (
    (r"\frac{{{a}}}{{{b}}}", r"\frac{{{c}}}{{{b}}}"),
    (r"\sqrt{{{a}}}", r"\sqrt{{{b}}}"),
    (r"({a}, {b})", r"({b}, {a})"),
    (r"{a}x^2 + {b}x", r"{b}x^2 + {a}x"),
    (r"{a}\pi", r"{b}\pi"),
    (r"[{a}, {c})", r"({a}, {c})"),
    (r"2^{{{a}}}", r"2^{{{b}}}"),
    (r"\{{{a}, {b}, {c}\}}", r"\{{{a}, {b}\}}"),
)
"""A right and a wrong answer of each kind; b and c are larger than a."""


def words(count: int) -> list[tuple[Reward, Candidate]]:
    """Answers like those to GSM8K: some lines of text and a whole number, half of them wrong."""
    dice = random.Random(1)
    found = []
    for n in range(count):
        answer = dice.randrange(1, 5000)
        said = answer + n % 2
        found.append((MATH, Candidate(f"{WORKING * 5}The result is \\boxed{{{said}}}.", {"answer": str(answer)})))
    return found


def formulas(count: int) -> list[tuple[Reward, Candidate]]:
    """Answers like those to MATH: fractions, roots, polynomials, intervals and sets, half of them wrong."""
    dice = random.Random(2)
    found = []
    for n in range(count):
        a = dice.randrange(2, 50)
        numbers = {"a": a, "b": a + dice.randrange(1, 9), "c": a + dice.randrange(10, 19)}
        right, wrong = (form.format(**numbers) for form in FORMULAS[n % len(FORMULAS)])
        said = wrong if n // len(FORMULAS) % 2 else right
        found.append((MATH, Candidate(f"{WORKING * 10}Hence $x = \\boxed{{{said}}}$.", {"answer": right})))
    return found
