"""Owns how a problem is rewritten so that its answer is an integer: what a model is asked, and which answers count.

Must not send anything. The transformation is that of the DAPO paper's Appendix A (arXiv 2503.14476), as in
DAPO-Math-17k; the wording is our own.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,100})")
LONGEST_QUESTION = 20_000
GROWTH, ROOM = 4, 2000
"""A rewritten question may have GROWTH times the characters of the original, and ROOM more."""

REWRITE = """\
You turn mathematics problems into problems whose answer is one integer, because integers are easy to check by rule.
You get a problem and its correct answer, which is not an integer. Write the same problem again with another ending, so
that:
- everything that is given stays: numbers, names, conditions, definitions, figures in code. Do not solve any of it;
- the new ending first fixes the form of the original answer with letters, and says what makes the letters unique
  (lowest terms, a square-free radicand, positive integers, a named order), then asks for one integer from them, mostly
  their sum. For instance, if the answer is (3 + 2 sqrt 5)/7, the ending says that the value can be written as
  (a + b sqrt c)/d in lowest terms, with positive integers and square-free c, and asks for a + b + c + d, which is 17;
- for a word, a choice or a set, it asks for a number that follows from it, such as the place of the choice in its list
  or the sum of the set's elements;
- the new problem does not reveal the original answer or the integer.
Answer with a JSON object and nothing else: {"question": the whole new problem, "answer": the integer}. If there is no
such ending, answer {"question": "", "answer": null}."""

CHECK = """\
You get a mathematics problem with its correct answer, and a new problem that was made from it by another ending. Say
whether the new problem gives the same facts, can be understood alone, and has exactly one answer, an integer; then find
that integer from the correct answer of the first problem.
Answer with a JSON object and nothing else: {"valid": true or false, "answer": the integer, or null}."""


class Problem(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class RewriteError(ValueError):
    """A model's answer that does not count. The text is a cause, the same for all of its kind."""


class RefusedRewriteError(RewriteError):
    """The model's service refused what was sent. The text ends with the status and what the service said."""


def is_integer(answer: str) -> bool:
    """Whether an answer is an integer as it is, thousands separators allowed."""
    return INTEGER.fullmatch(answer.strip()) is not None


def rewrite_messages(problem: Problem) -> list[dict[str, str]]:
    """What the model is asked, to rewrite a problem."""
    return _messages(REWRITE, {"problem": problem.question, "answer": problem.answer})


def check_messages(problem: Problem, rewritten: Problem) -> list[dict[str, str]]:
    """What the model is asked, to confirm a rewritten problem; it is not shown the integer."""
    asked = {"problem": problem.question, "answer": problem.answer, "new_problem": rewritten.question}
    return _messages(CHECK, asked)


def _messages(system: str, asked: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": json.dumps(asked, ensure_ascii=False)},
    ]


def read_rewrite(problem: Problem, content: str) -> Problem:
    """The rewritten problem in a model's answer. Raises RewriteError."""
    document = _object(content)
    question, answer = document.get("question"), document.get("answer")
    if not isinstance(question, str) or not question.strip() or answer is None:
        raise RewriteError("the model gave no new problem")
    if _plain(question) == _plain(problem.question):
        raise RewriteError("the problem was not changed")
    if len(question) > min(LONGEST_QUESTION, GROWTH * len(problem.question) + ROOM):
        raise RewriteError("the new problem is too long")
    return Problem(question.strip(), str(_integer(answer)))


def check_confirmed(rewritten: Problem, content: str) -> None:
    """Raise RewriteError unless a model's answer confirms the rewritten problem and finds the same integer."""
    document = _object(content)
    if document.get("valid") is not True:
        raise RewriteError("the check rejected the new problem")
    if str(_integer(document.get("answer"))) != rewritten.answer:
        raise RewriteError("the check found another integer")


def _object(content: str) -> dict[str, object]:
    """The JSON object of an answer, which may stand in a fence of Markdown or behind a model's thoughts."""
    start, end = content.find("{"), content.rfind("}")
    for text in (content, content[start : end + 1] if 0 <= start < end else ""):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    raise RewriteError("the model's answer is no JSON object")


def _integer(answer: object) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and abs(answer) < 10**100:
        return answer
    if isinstance(answer, str) and is_integer(answer):
        return int(answer.strip().replace(",", ""))
    raise RewriteError("the new answer is no integer")


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
