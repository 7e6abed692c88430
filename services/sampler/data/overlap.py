"""Owns the search for questions that two sources share, even if one of them wraps its questions in an instruction.

Must not compare meaning: a reworded question is a different question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

WORDS = 8  # shorter questions must be equal: inside a longer text they would match by chance


def normalised(text: str) -> str:
    """The text with each run of white space as one blank. Questions with equal normalised text are the same."""
    return " ".join(text.split())


def shared(questions: Collection[str], others: Collection[str]) -> set[str]:
    """The `questions` that equal, contain or are contained in one of `others`. All texts must be normalised.

    A text contains a question of at least WORDS words if all of its words occur in a row. Takes time in proportion to
    the length of the texts.
    """
    containing = {question for question, _ in _containments(questions, others)}
    contained = {question for _, question in _containments(others, questions)}
    return set(questions) & set(others) | containing | contained


def _containments(texts: Collection[str], inner: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs (text, question of `inner` that it contains)."""
    by_head: dict[tuple[str, ...], list[list[str]]] = {}
    for question in inner:
        words = question.split(" ")
        if len(words) >= WORDS:
            by_head.setdefault(tuple(words[:WORDS]), []).append(words)
    for text in texts if by_head else ():
        words = text.split(" ")
        for start in range(len(words) - WORDS + 1):
            for question_words in by_head.get(tuple(words[start : start + WORDS]), ()):
                if words[start : start + len(question_words)] == question_words:
                    yield text, " ".join(question_words)
