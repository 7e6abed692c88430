"""Owns the table on speed: verdicts per CPU second, of the verifier `math` and of math-verify alone.

Must not count the import of a library.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.verifier.verdicts.golds import golds, verdict

RESPONSES = 16  # of each prompt
STEPS = "We compute it step by step, so that the sum is larger. " * 40
PROBLEMS = 100


def _alone(response: str, gold: str) -> str:
    """math-verify on the end of a response, as the verifier called it before it read answers itself."""
    from math_verify import parse, verify

    expected = parse(f"${gold}$", parsing_timeout=None)
    found = parse(response[-2000:], parsing_timeout=None)
    return "correct" if verify(expected, found, timeout_seconds=None) else "wrong"


def _rate(judged: Callable[[str, str], str], work: list[tuple[str, str]]) -> float:
    started = time.process_time()
    for response, gold in work:
        judged(response, gold)
    return len(work) / (time.process_time() - started)


def table(path: Path) -> Iterator[str]:
    """Lines of the table on one file's golds: half of the responses are correct."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answers = golds(path)[:PROBLEMS]
    work = [
        (rf"{STEPS}So \boxed{{{gold if number % 2 else other}}}.", gold)
        for gold, other in zip(answers, answers[1:] + answers[:1], strict=True)
        for number in range(RESPONSES)
    ]
    for judged in (verdict, _alone):
        judged(r"\boxed{\sqrt{x}}", r"\sqrt{y}")
    ours, theirs = _rate(verdict, work), _rate(_alone, work)
    yield f"{path.stem}: {ours:.0f} verdicts per CPU second; math-verify alone {theirs:.0f}; ratio {ours / theirs:.1f}"
