"""Owns how a question is put to the policy: the table of prompt formats.

Must not choose one; the source's setting does.
"""

from __future__ import annotations

from collections.abc import Callable


def _plain(question: str) -> str:
    return question


def _dapo(question: str) -> str:
    """DAPO's form (reasoning, then a last line `Answer: ...`), which verifier `answer-line` reads; in our own words."""
    return (
        f"{question}\n\n"
        "Reason step by step before you settle on a result. Close with a line of its own that reads\n"
        "Answer: <your result>\n"
        "and write nothing after it."
    )


FORMATS: dict[str, Callable[[str], str]] = {"plain": _plain, "dapo": _dapo}
"""By data.prompt_format: from a question to the text of the user's message."""
