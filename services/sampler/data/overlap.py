"""Owns the search for questions that two sources share, although one of them may wrap its questions in an instruction.

Must not compare meaning: a reworded question is another question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

WORDS = 8  # a shorter question is found only as a whole: inside a longer text it would be found by chance


def normalised(text: str) -> str:
    """The text with every run of white space as one blank: what makes two questions the same."""
    return " ".join(text.split())


def shared(questions: Collection[str], others: Collection[str]) -> set[str]:
    """Those of `questions` that equal one of `others`, hold one, or are held by one; all of them normalised.

    Holding means the other's words in a row, at least WORDS of them. Takes time in proportion to the texts' length.
    """
    holding = {question for question, _ in _holdings(questions, others)}
    held = {question for _, question in _holdings(others, questions)}
    return set(questions) & set(others) | holding | held


def _holdings(texts: Collection[str], inner: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs (text, the inner one that it holds)."""
    by_head: dict[tuple[str, ...], list[list[str]]] = {}
    for one in inner:
        words = one.split(" ")
        if len(words) >= WORDS:
            by_head.setdefault(tuple(words[:WORDS]), []).append(words)
    for text in texts if by_head else ():
        words = text.split(" ")
        for start in range(len(words) - WORDS + 1):
            for wanted in by_head.get(tuple(words[start : start + WORDS]), ()):
                if words[start : start + len(wanted)] == wanted:
                    yield text, " ".join(wanted)
