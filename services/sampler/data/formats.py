"""Owns the table of prompt formats: how a question is worded for the policy.

Must not choose a format; the source's setting does.
"""

from __future__ import annotations

from collections.abc import Callable


def _plain(question: str) -> str:
    return question


def _dapo(question: str) -> str:
    """DAPO's format in our own words: reasoning, then a last line `Answer: ...`, which `answer-line` parses."""
    return (
        f"{question}\n\n"
        "Reason step by step before you settle on a result. Close with a line of its own that reads\n"
        "Answer: <your result>\n"
        "and write nothing after it."
    )


FORMATS: dict[str, Callable[[str], str]] = {"plain": _plain, "dapo": _dapo}
"""By data.prompt_format: question -> text of the user message."""
